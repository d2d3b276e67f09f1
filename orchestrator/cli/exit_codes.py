"""The exit codes of `freshet`."""

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
