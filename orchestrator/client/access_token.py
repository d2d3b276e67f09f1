"""The file of a service's tokens; which token to send to a service, and where it may go. Tokens are never part of a
message."""

from __future__ import annotations

import ipaddress
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from workers.protocol.errors import JobError

TOKEN, TOKEN_FILE, PLAIN_HTTP = "FRESHET_TOKEN", "FRESHET_TOKEN_FILE", "FRESHET_PLAIN_HTTP"
DEFAULT_FILE = ".freshet/tokens.json"
"""In the home folder, where a service on this machine keeps its tokens."""


class Role(StrEnum):
    """Permissions of a token's holder."""

    READ = "read"
    """See everything, change nothing."""
    CONTROL = "control"
    """See and control everything."""


@dataclass(frozen=True)
class Credentials:
    """A token, and where it came from."""

    token: str = field(repr=False)
    """Empty: there is none."""
    source: str
    """For messages."""


def checked_url(address: str, environment: Mapping[str, str]) -> str:
    """The base URL of the service at `address`, which a token may be sent to.

    Raises:
        JobError: it is no URL of a service, or the token would cross a network in the clear.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise JobError(f"the address of the service is no URL: {error}; expected http://HOST:PORT") from error
    if parts.username is not None or parts.password is not None:
        raise JobError(
            f"the address of the service holds a password: name it as {parts.scheme}://{host}, and put the token into"
            f" {TOKEN} or {TOKEN_FILE}"
        )
    if parts.scheme.lower() not in ("http", "https") or not host or parts.query or parts.fragment:
        raise JobError(
            f"{address!r} is no address of a service: expected http://HOST:PORT or https://HOST:PORT"
        )
    if parts.scheme.lower() == "http" and not is_loopback(host) and environment.get(PLAIN_HTTP) != "1":
        raise JobError(
            f"{address} is plain HTTP to another machine, and whoever is on the way could read the token: use https://,"
            f" or a tunnel such as `ssh -L 8270:localhost:8270 {host}`; {PLAIN_HTTP}=1 sends it all the same"
        )
    return address.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def find_credentials(url: str, environment: Mapping[str, str], home: Path) -> Credentials:
    """The token for the service at `url`: that of `FRESHET_TOKEN`; else of the file of `FRESHET_TOKEN_FILE`; else, for
    a service on this machine, of the file in `home`, if it exists.

    Raises:
        JobError: a file that was named cannot be read, holds no token, or others may read it; or the service is
            elsewhere, and none is named.
    """
    if token := environment.get(TOKEN):
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise JobError(f"{TOKEN} holds no token: one is a single word of ASCII characters")
        return Credentials(token, TOKEN)
    path = Path(environment.get(TOKEN_FILE) or home / DEFAULT_FILE)
    if not environment.get(TOKEN_FILE):
        if not is_loopback(urlsplit(url).hostname or ""):
            raise JobError(
                f"there is no token for {url}: set {TOKEN}, or {TOKEN_FILE} to a file of that service's tokens ({path}"
                " is for a service on this machine, and sent nowhere else)"
            )
        if not path.exists():
            return Credentials("", "")
    tokens = read_tokens(path)
    return Credentials(tokens.get(Role.CONTROL) or tokens[Role.READ], str(path))


def read_tokens(path: Path) -> dict[Role, str]:
    """The tokens in the file `path`: one, or both.

    Raises:
        JobError: it cannot be read, holds no tokens, or others may read it.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise JobError(f"others may read the token file {path} (mode {mode:o}): chmod 600 it")
        known = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read the token file {path}: {error.strerror or error}") from error
    except ValueError:
        # Not the parser's words: they may quote the file.
        known = None
    tokens = {role: known[role] for role in Role if role in known} if isinstance(known, dict) else {}
    if not tokens or not all(
        isinstance(token, str) and token and token.isascii() for token in tokens.values()
    ):
        raise JobError(f'{path} is no token file: expected {{"read": "...", "control": "..."}}')
    return tokens
