"""Names of addresses. Torch asks for one at each connection to a store, while a generation forms, and only to log it.

Where the answer is lost, or nobody answers at all, glibc waits 5 s and asks once more: a recovery would take as long.
"""

from __future__ import annotations

import os

RESOLVER = "timeout:1 attempts:3"
"""See resolv.conf(5): after 1 s it asks again, and after 3 s it does without."""


def keep_lookups_short() -> None:
    """Have lookups take 3 s at most, in threads of this process that make their first one from now on, unless the
    environment says otherwise."""
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
