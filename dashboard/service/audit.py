"""The audit log: every control and every refused request, with who sent it and from where. No tokens, no bodies."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Size at which the log is set aside as `NAME.1`, in place of the one before."""
LONGEST = 300
"""Most characters of a path that are kept."""


class Audit:
    """Appends to the file `path`, which only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def write(
        self, *, time_s: float, caller: str, method: str, path: str, status: int, why: str = ""
    ) -> None:
        """Append one line. A disk that cannot be written stops no control: the service's log says so, once."""
        line = {
            "time_s": round(time_s, 3),
            "caller": caller,
            "method": method,
            "path": path[:LONGEST],
            "status": status,
        } | ({"why": why} if why else {})
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
