"""What the service is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PORT = 8270
HOME = Path.home() / ".freshet"
TOKENS = HOME / "tokens.json"
AUDIT = HOME / "audit.jsonl"
MOST_BODY_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The service's settings."""

    address: str | None = "auto"
    """The cluster whose jobs are shown; None: only past runs."""
    runs: tuple[Path, ...] = ()
    """Folders of past runs: each is one, or holds some."""
    host: str = "127.0.0.1"
    port: int = PORT
    """0: any free port."""
    any_port: bool = False
    """Whether another free port will do if this one is taken."""
    until_input_ends: bool = False
    """Whether to end when standard input does."""
    tokens: Path = TOKENS
    """File of the bearer tokens; made if it does not exist."""
    audit: Path = AUDIT
    """File to which every control and every refused request is appended, as JSON lines."""
    hosts: tuple[str, ...] = ()
    """Names under which a proxy may reach the service, besides its own address and loopback."""
    trust_specs: bool = False
    """Whether submitted specs may name import paths, and files outside `roots`."""
    roots: tuple[Path, ...] = field(default_factory=lambda: (Path.cwd(),))
    """Folders in which a submitted spec may name files."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
