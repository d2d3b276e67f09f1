"""The exit codes of `freshet`."""

PROVED_IN_PART = 3
"""Exit code of `verify` if nothing is wrong, and not all is proved."""
DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
