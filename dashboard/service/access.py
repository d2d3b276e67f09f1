"""Who may do what: bearer tokens in a file of their owner's, and the session cookies that pages get for them.

A cookie is signed with a key made from the tokens: it survives a restart of the service, and new tokens end it.
Pure except for the token file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client.access_token import Role, read_tokens
from orchestrator.client.errors import JobError

SESSION_S = 12 * 3600.0
"""Lifetime of a session."""
COOKIE = "freshet_session"
LEAST_TOKEN = 16
"""Fewest characters of a token."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    role: Role
    host: str
    """Network address."""
    cookie: bool = False
    """Whether a session cookie said so, rather than a token."""

    @property
    def name(self) -> str:
        """For logs: the role and the address, never the token."""
        return f"{self.role} from {self.host}"


class Access:
    """Tells callers by their tokens and cookies.

    Args:
        tokens: role -> token.
    """

    def __init__(self, tokens: Mapping[Role, str]) -> None:
        self._tokens = dict(tokens)
        joined = "\0".join(self._tokens[role] for role in sorted(self._tokens))
        self._key = hashlib.sha256(b"freshet session" + joined.encode()).digest()

    def role_of_token(self, token: str) -> Role | None:
        """The role that `token` gives; None for no such token. Takes the same time whatever the token."""
        found = None
        for role, known in self._tokens.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                found = role
        return found

    def make_cookie(self, role: Role, now_s: float) -> str:
        """The value of a new session's cookie."""
        body = f"{role}.{int(now_s + SESSION_S)}.{secrets.token_hex(8)}"
        return f"{body}.{self._signature(body)}"

    def role_of_cookie(self, value: str, now_s: float) -> Role | None:
        """The role of a session; None if the cookie is not ours or has expired."""
        body, _, signature = value.rpartition(".")
        if not hmac.compare_digest(self._signature(body).encode(), signature.encode()):
            return None
        role, expires_s, _ = body.split(".")
        return Role(role) if now_s < int(expires_s) else None

    def _signature(self, body: str) -> str:
        return hmac.new(self._key, body.encode(), hashlib.sha256).hexdigest()


def open_tokens(path: Path) -> dict[Role, str]:
    """The tokens in the file `path`, which is made at the first start, for its owner alone.

    Raises:
        JobError: the file cannot be read or made, holds no tokens, or others may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _checked(read_tokens(path), path)
        made = {role: secrets.token_urlsafe(32) for role in Role}
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(made, file, indent=1)
    except OSError as error:
        raise JobError(f"cannot make the token file {path}: {error.strerror or error}") from error
    return made


def _checked(tokens: dict[Role, str], path: Path) -> dict[Role, str]:
    short = [role for role, token in tokens.items() if len(token) < LEAST_TOKEN]
    if short or Role.CONTROL not in tokens:
        what = (
            f"its {short[0]} token has fewer than {LEAST_TOKEN} characters" if short else "no control token"
        )
        raise JobError(f"the token file {path}: {what}; remove it, and a new one is made")
    return tokens
