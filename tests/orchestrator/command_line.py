"""The command line, called inside the process of the tests."""

from __future__ import annotations

import sys

from orchestrator.cli.main import main


def freshet_here(*arguments: str) -> int | str | None:
    """Run `freshet` in this process and return its exit code."""
    before = sys.argv, sys.path[:]
    sys.argv = ["freshet", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv, sys.path[:] = before
    return 0
