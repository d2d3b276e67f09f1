"""Tells from a late rank's calls whether it is the one that hangs, or waits for another rank. Pure."""

from __future__ import annotations

import re

# The transport runs no code of the user's, so a rank that is inside waits for the ranks at the other ends.
_WAITS = re.compile(
    r'^  File ".*/workers/transport/\w+\.py", line \d+'
    # For the port of the store, which rank 0 opens after its setup.
    r'|^  File ".*/multiprocessing/connection\.py", line \d+ in recv\n  File ".*/workers/launch/profile\.py"',
    re.MULTILINE,
)


def waits_for_a_rank(calls: str) -> bool:
    """Whether a thread waits for another rank.

    Args:
        calls: the thread's stack as faulthandler prints it, or `traceback`, which lists the innermost call last.
    """
    return _WAITS.search(calls) is not None
