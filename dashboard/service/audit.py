"""The audit log: every control, and in a file beside it every refused request, with who sent it and from where. No
tokens, no bodies."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from dashboard.service.limits import RateLimit

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Size at which a file of the log is set aside as `NAME.1`, in place of the one before."""
LONGEST = 300
"""Most characters of each text that are kept."""
OTHERS_PER_S, OTHERS_AT_ONCE = 1.0, 100


def other_audit(path: Path) -> Path:
    """Where the log whose controls are in `path` has all else: refusals, logins and logouts, failures."""
    return path.with_name(f"{path.stem}.other{path.suffix}")


def audit_files(path: Path) -> tuple[Path, ...]:
    """Every file of the log whose controls are in `path`."""
    return tuple(file for each in (path, other_audit(path)) for file in (each, _set_aside(each)))


def _set_aside(path: Path) -> Path:
    return path.with_name(path.name + ".1")


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """An answered request, for the audit log."""

    time_s: float
    caller: str
    method: str
    path: str
    status: int
    about: str = ""
    """The job that the path does not name."""
    why: str = ""
    """Why it was refused."""
    control: bool
    """Whether it passed the guard as a control."""
    known: bool
    """Whether its sender has a token."""


class Audit:
    """Appends controls to the file `path` and all else to `other_audit(path)`; only their owner may read them. Whoever
    may not control cannot push controls out, which have a file of their own. Nor can a caller flood the other file: of
    each, `OTHERS_PER_S` lines per second are kept there; callers without a token count as one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        self._others = RateLimit(per_s=OTHERS_PER_S, burst=OTHERS_AT_ONCE)

    def write(self, entry: AuditEntry) -> None:
        """Append one line. A disk that cannot be written stops no control: the service's log says so, once."""
        if not entry.control and self._others.wait_s(entry.caller if entry.known else "", entry.time_s):
            return
        texts = {name: getattr(entry, name) for name in ("caller", "method", "path", "about", "why")}
        line = {"time_s": round(entry.time_s, 3), "status": entry.status} | {
            name: text[:LONGEST] for name, text in texts.items() if text
        }
        file = self._path if entry.control else other_audit(self._path)
        try:
            _append(file, json.dumps(line) + "\n")
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("the audit log %s cannot be written: %s", file, error)
            self._failed = True


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size > MOST_BYTES:
        path.replace(_set_aside(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(line)
