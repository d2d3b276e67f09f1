"""Names of addresses. Torch asks for one at each connection to a store, while a generation forms, and only to log it.

Where the answer is lost, or nobody answers at all, glibc waits 5 s and asks once more: a recovery would take as long.
"""

from __future__ import annotations

import os

RESOLVER = "timeout:1 attempts:3"
"""See resolv.conf(5): after 1 s it asks again, and after 3 s, where there is one name server, it does without."""


def keep_lookups_short() -> None:
    """Set that for this process, unless its environment says otherwise. It must have looked up no name before: glibc
    reads the environment at the first lookup."""
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
