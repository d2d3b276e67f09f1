"""How fast this machine is now: limits in tests follow it, so that a machine with other work to do fails no test.

A limit is there to end a test that hangs, not to measure the machine: on a quiet machine it stays as it is.
"""

from __future__ import annotations

import os
import time

SPIN_S = 0.03
"""Processor time that the measurement takes."""
MOST = 20.0


def patient(limit_s: float) -> float:
    """Return `limit_s` for a quiet machine as it is on this one, now: longer by as much as other work slows it down."""
    return limit_s * max(_PACE, pace_of_load())


def pace_of_load() -> float:
    """Return how many processes wanted each core in the last minute, at least 1."""
    return min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def measured_pace() -> float:
    """Return how many times longer computing takes than its processor time, at least 1: what others take of a core."""
    began_s, until_s = time.perf_counter(), time.process_time() + SPIN_S
    while time.process_time() < until_s:
        pass
    return min(MOST, max(1.0, (time.perf_counter() - began_s) / SPIN_S))


_PACE = measured_pace()
"""When this process started; the load average follows a new load only after a minute."""
