"""The audit log: every control and every refused request, with who sent it and from where. No tokens, no bodies."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from dashboard.service.limits import RateLimit

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Size at which the log is set aside as `NAME.1`, in place of the one before."""
LONGEST = 300
"""Most characters of each text that are kept."""
REFUSED_PER_S = 1.0


class Audit:
    """Appends to the file `path`, which only its owner may read. Strangers cannot flood it: of what is refused without
    a token, `REFUSED_PER_S` lines per second are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        self._refused = RateLimit(per_s=REFUSED_PER_S, burst=100)

    def write(
        self,
        *,
        time_s: float,
        caller: str,
        method: str,
        path: str,
        status: int,
        about: str = "",
        why: str = "",
        refused: bool = False,
    ) -> None:
        """Append one line. A disk that cannot be written stops no control: the service's log says so, once.

        Args:
            about: the job that the path does not name.
            why: why it was refused.
            refused: whether its sender had no token.
        """
        if refused and self._refused.wait_s("", time_s):
            return
        texts = {"caller": caller, "method": method, "path": path, "about": about, "why": why}
        line = {"time_s": round(time_s, 3), "status": status} | {
            name: text[:LONGEST] for name, text in texts.items() if text
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("the audit log %s cannot be written: %s", self._path, error)
            self._failed = True
