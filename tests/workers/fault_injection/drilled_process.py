"""What fault tests run in a separate process. It does not import torch, so the process starts at once."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultPhase
from workers.fault_injection.points import FaultPoints


def steps_through(pipe: Connection, values: dict[str, Any], step: int) -> None:
    """A minimal rank: it announces each phase of each step up to `step`, then reaches it."""
    faults = FaultPoints(pipe.send, rank=1, allowed=True)
    faults.arm(Fault.from_json(values))
    for number in range(1, step + 1):
        for phase in FaultPhase:
            pipe.send((number, phase))
            faults.reach(phase, number)
    pipe.send("through")
    pipe.recv()


def waiting(pipe: Connection, values: dict[str, Any]) -> None:
    """A rank that waits for another one when its fault fires."""
    faults = FaultPoints(pipe.send, rank=1, allowed=True)
    faults.arm(Fault.from_json(values))
    pipe.send("armed")
    pipe.recv()
