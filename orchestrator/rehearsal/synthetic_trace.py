"""Traces that are made up: nodes preempted with a probability at regular times. Pure: a seed decides all."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from orchestrator.rehearsal.traces import NodeChange, NodeChangeKind, NodeTrace, ordered
from workers.protocol.errors import JobError

MINUTE_MS = 60_000
LEAST_MIN = 0.001


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Every `every_min` minutes each node is preempted with probability `probability`; a new one comes in its place."""

    probability: float
    """In [0, 1]."""
    every_min: float
    back_min: float | None
    """Minutes until the new one comes; None: none ever comes."""

    @staticmethod
    def parse(text: str) -> Preemption:
        """`P:D`, `P:D:B` or `P:D:never`; without B a new node comes after D minutes.

        Raises:
            JobError: it is none of these, or a number is out of range.
        """
        parts = text.split(":")
        try:
            if not 2 <= len(parts) <= 3:
                raise ValueError
            probability, every_min = float(parts[0]), float(parts[1])
            back = parts[2] if len(parts) == 3 else parts[1]
            back_min = None if back == "never" else float(back)
        except ValueError:
            raise JobError(
                f"--synthetic {text}: expected P:D or P:D:B, such as 0.1:10 (each node is preempted with probability"
                " 0.1 every 10 minutes) with B minutes until a new one comes, or `never`"
            ) from None
        if not 0 <= probability <= 1:
            raise JobError(f"--synthetic {text}: the probability must be from 0 to 1")
        for minutes in (every_min, every_min if back_min is None else back_min):
            if not LEAST_MIN <= minutes < float("inf"):
                raise JobError(f"--synthetic {text}: the minutes must be at least {LEAST_MIN}")
        return Preemption(probability=probability, every_min=every_min, back_min=back_min)


def synthetic(nodes: int, preemption: Preemption, length_min: float, seed: int) -> NodeTrace:
    """A trace of `nodes` slots, all of them live at time 0, that is `length_min` minutes long."""
    end_ms = round(length_min * MINUTE_MS)
    changes: list[NodeChange] = []
    for slot in range(nodes):
        changes += _slot(slot, preemption, end_ms, Random(f"{seed}/{slot}"))
    return NodeTrace(changes=ordered(changes), end_ms=end_ms)


def _slot(slot: int, preemption: Preemption, end_ms: int, random: Random) -> list[NodeChange]:
    """The lives of one slot's nodes, one after the other."""
    changes: list[NodeChange] = []
    time_ms, life = 0, 1
    every_ms = preemption.every_min * MINUTE_MS
    while True:
        node = f"node{slot}.{life}"
        changes.append(NodeChange(time_ms=time_ms, kind=NodeChangeKind.ADD, node=node))
        # All nodes are tried at the same times: as many as chance wills go at once.
        tick = int(time_ms // every_ms) + 1
        if round(tick * every_ms) <= time_ms:  # it came at a tick, whose time was rounded down
            tick += 1
        while random.random() >= preemption.probability:
            tick += 1
            if round(tick * every_ms) > end_ms:
                break
        time_ms = round(tick * every_ms)
        if time_ms > end_ms:
            return changes
        changes.append(NodeChange(time_ms=time_ms, kind=NodeChangeKind.REMOVE, node=node))
        if preemption.back_min is None:
            return changes
        time_ms += round(preemption.back_min * MINUTE_MS)
        life += 1
        if time_ms > end_ms:
            return changes
