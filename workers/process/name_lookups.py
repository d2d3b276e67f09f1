"""Reverse name lookups. Torch makes one, only for a log line, for each connection to a store while a generation forms.

If the answer is lost or no server answers, glibc waits 5 s and asks once more: a recovery would take as long.
"""

from __future__ import annotations

import os

RESOLVER = "timeout:1 attempts:3"
"""See resolv.conf(5): glibc asks again after 1 s, and with one name server gives up after 3 s."""


def keep_lookups_short() -> None:
    """Set `RESOLVER` for this process, unless its environment sets other options.

    Call it before the first lookup, at which glibc reads the environment."""
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
