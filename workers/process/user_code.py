"""Says in words what a user's code raised, and in which of the user's lines."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_OURS = tuple(
    str(Path(__file__).resolve().parents[2] / name) + os.sep
    for name in ("workers", "orchestrator", "planner")
)


def what_it_did(error: BaseException) -> str:
    """`raised ValueError: width 3 is odd`, or `called sys.exit(0)`."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    return f"raised {type(error).__name__}: {error}"


def where(error: BaseException) -> str:
    """`, at my_net.py:12 in build`: the innermost of the user's lines in the traceback of `error`; empty where there is
    none, as when the arguments do not fit the function."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def is_users(file: str) -> bool:
    """Whether `file` belongs neither to us nor to a library."""
    if file.startswith("<"):  # made by the interpreter
        return False
    path = os.path.realpath(file)
    libraries = {os.path.realpath(prefix) + os.sep for prefix in (sys.prefix, sys.base_prefix)}
    return not path.startswith((*libraries, *_OURS)) and "site-packages" not in Path(path).parts
