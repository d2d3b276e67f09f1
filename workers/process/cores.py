"""One core for each rank of a node, so that what else runs on a core disturbs the ranks of that core alone.

Linux alone binds threads to cores.
"""

from __future__ import annotations

import os

from workers.protocol.errors import JobError


def core_of(number: int) -> int:
    """The core of rank `number`: ranks take the cores that this process may use in turn.

    Raises:
        JobError: this system binds no thread to a core.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise JobError("cluster.pin_cores: this system binds no process to a core; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


def pin_to_core(number: int) -> None:
    """Bind the calling thread, which trains rank `number`, and the threads that it starts to that rank's core.

    Raises:
        JobError: this system binds no thread to a core.
    """
    os.sched_setaffinity(0, {core_of(number)})
