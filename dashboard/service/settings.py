"""Startup settings of the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dashboard.service.audit import audit_files
from orchestrator.client.access_token import DEFAULT_FILE

PORT = 8270
TOKENS = Path.home() / DEFAULT_FILE
AUDIT = TOKENS.with_name("audit.jsonl")
MOST_BODY_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
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
    """File to which every control is appended, as JSON lines; `other_audit` beside it has refused requests."""
    hosts: tuple[str, ...] = ()
    """Names and addresses under which the service may be reached, besides `host` and loopback. With a `host` that
    listens on every address, the first is announced."""
    trust_specs: bool = False
    """Whether submitted specs may name import paths, and files outside `roots`."""
    roots: tuple[Path, ...] = field(default_factory=lambda: (Path.cwd(),))
    """Folders in which a submitted spec may name files."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @property
    def own_files(self) -> tuple[Path, ...]:
        """The service's own files, which no submitted spec may name."""
        return (self.tokens, *audit_files(self.audit))
