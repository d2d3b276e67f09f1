"""Cause of death of a rank's process, in a few words, from Ray's message about a dead actor. Pure."""

from __future__ import annotations

import re

UNKNOWN = "killed, crashed, out of memory, or its node is gone"
"""Ray knows neither the signal nor the exit code of a process that just closed its connection."""
_EXIT_CODE = re.compile(r"exits? with an exit code (-?\d+)")


def cause_of_death(text: str) -> str:
    """Return the cause that Ray's message `text` names."""
    if (code := _EXIT_CODE.search(text)) is not None:
        return f"exit code {code[1]}"
    if "node has died" in text or "node was terminated" in text:
        return "its node is gone"
    if "low on memory" in text or "NODE_OUT_OF_MEMORY" in text:
        return "Ray killed it because its node ran low on memory"
    if "killed by `ray.kill`" in text:
        return "killed by ray.kill"
    return UNKNOWN
