"""Assigns every second of every live node of a rehearsal to one use. Pure: history in, node-seconds out.

A node lives from when the cluster had it until it was killed. The job's own start, before the trace begins, is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.events.rehearsed import NodeLife, Rehearsed
from orchestrator.events.types import Regrouped
from orchestrator.history.recovery_history import RecoveryHistory
from orchestrator.history.totals import PARTS, part_seconds


class NodeUse(StrEnum):
    """Use of a live node's time."""

    TRAINED = "trained"
    """In steps that were committed and stand."""
    STALLED = "stalled"
    """In those steps, longer than usual, because a rank stood still and went on."""
    IN_FLIGHT = "in_flight"
    """In a step that a failure interrupted, from the commit before it to the first sign of the failure."""
    RECOVERING = "recovering"
    """From the first sign until the next generation trained."""
    UNDONE = "undone"
    """In committed steps that a return to a checkpoint voided."""
    JOINING = "joining"
    """A node that is not yet a member of a generation, and becomes one later."""
    PAUSED = "paused"
    """The job waited for capacity."""
    LEAVING = "leaving"
    """A node with a termination notice, which no longer trains."""
    IDLE = "idle"
    """A node that no generation uses."""


PER_EVENT = (NodeUse.IN_FLIGHT, NodeUse.RECOVERING, NodeUse.UNDONE, NodeUse.JOINING)
"""Uses that each change of nodes causes; the trace sets how long the others last."""


@dataclass(frozen=True)
class _Phase:
    """A stretch of time in which all members of a generation have the same use."""

    start_s: float
    end_s: float
    use: NodeUse
    nodes: frozenset[str]
    """Ids of its nodes; other nodes join, leave or are idle."""
    caused: int | None
    """Index of the generation whose formation caused it."""
    stalled: float = 0.0
    """The share of it that standstills have added to what its steps usually take."""


@dataclass
class Spent:
    """Node-seconds."""

    by_use: dict[NodeUse, float] = field(default_factory=lambda: dict.fromkeys(NodeUse, 0.0))
    by_generation: dict[int, dict[NodeUse, float]] = field(default_factory=dict)
    """Index of a generation -> cost of its formation."""


def spend(history: RecoveryHistory, rehearsed: Rehearsed) -> Spent:
    """Divide the node-seconds of `rehearsed` by use."""
    spent = Spent()
    first_use = _first_use(history)
    for phase in _phases(history, rehearsed):
        for life in rehearsed.lives:
            up_s, down_s = _life(life, rehearsed)
            for start_s, end_s, use in _uses(phase, life, first_use.get(life.node)):
                seconds = min(end_s, down_s) - max(start_s, up_s)
                if seconds <= 0:
                    continue
                stalled_s = seconds * phase.stalled if use is NodeUse.TRAINED else 0.0
                spent.by_use[NodeUse.STALLED] += stalled_s
                spent.by_use[use] += seconds - stalled_s
                if phase.caused is not None and use is phase.use:
                    price = spent.by_generation.setdefault(phase.caused, {})
                    price[use] = price.get(use, 0.0) + seconds
    return spent


def _phases(history: RecoveryHistory, rehearsed: Rehearsed) -> Iterator[_Phase]:
    """All time from the beginning of the trace to its end, in order."""
    last_s, last = float("-inf"), None
    for stretch in history.stretches():
        if stretch.start_s > last_s:
            yield from _gap(history, last_s, stretch.start_s, last, stretch.generation)
        use = NodeUse.TRAINED if stretch.stands else NodeUse.UNDONE
        nodes = _nodes(history, stretch.generation)
        length_s = stretch.end_s - stretch.start_s
        stalled = min(1.0, stretch.stalled_s / length_s) if length_s > 0 else 0.0
        yield _Phase(stretch.start_s, stretch.end_s, use, nodes, stretch.voided_by, stalled)
        last_s, last = stretch.end_s, stretch.generation
    if last_s < rehearsed.ended_s:
        yield from _gap(history, last_s, rehearsed.ended_s, last, None)


def _gap(
    history: RecoveryHistory, start_s: float, end_s: float, last: int | None, index: int | None
) -> Iterator[_Phase]:
    """Divide the time between the last commit of a generation and the next one's training: an interrupted step,
    perhaps a pause, the recovery.

    Args:
        last: index of the generation before.
        index: index of the generation that trained next; None if none did.
    """
    before, either = _nodes(history, last), _nodes(history, last) | _nodes(history, index)
    first = 0 if last is None else last + 1
    # A second failure may have ended the generations in between before they committed anything.
    signs = [
        generation.trains_s - sum(parts(generation.regrouped))
        for generation in history.generations[
            first : len(history.generations) if index is None else index + 1
        ]
        if generation.regrouped is not None and generation.trains_s is not None
    ]
    sign_s = min(max(min(signs, default=start_s), start_s), end_s)
    yield _Phase(start_s, sign_s, NodeUse.IN_FLIGHT, before, index)
    pause_s = next((time_s for time_s in history.pauses if start_s <= time_s < end_s), None)
    if pause_s is None:
        yield _Phase(sign_s, end_s, NodeUse.RECOVERING, either, index)
        return
    # The ranks detected and settled before the pause; the rest of the recovery came after it.
    regrouped = history.generations[index].regrouped if index is not None else None
    rest_s = sum(parts(regrouped)[2:]) if regrouped is not None else 0.0
    pause_s = max(pause_s, sign_s)
    resume_s = max(end_s - rest_s, pause_s)
    yield _Phase(sign_s, pause_s, NodeUse.RECOVERING, either, index)
    yield _Phase(pause_s, resume_s, NodeUse.PAUSED, either, None)
    yield _Phase(resume_s, end_s, NodeUse.RECOVERING, either, index)


def _uses(phase: _Phase, life: NodeLife, joins_s: float | None) -> Iterator[tuple[float, float, NodeUse]]:
    """The uses of a node in `phase`, if it is live; `joins_s`: when it first trained, if ever."""
    if life.node in phase.nodes:
        yield phase.start_s, phase.end_s, phase.use
        return
    if joins_s is not None and phase.start_s < joins_s:
        yield phase.start_s, phase.end_s, NodeUse.JOINING
        return
    if life.noticed_s is None or joins_s is None:
        yield phase.start_s, phase.end_s, NodeUse.IDLE
        return
    notice_s = min(max(life.noticed_s, phase.start_s), phase.end_s)
    yield phase.start_s, notice_s, NodeUse.IDLE
    yield notice_s, phase.end_s, NodeUse.LEAVING


def _life(life: NodeLife, rehearsed: Rehearsed) -> tuple[float, float]:
    """The part of a life that is in the rehearsal."""
    down_s = rehearsed.ended_s if life.down_s is None else min(life.down_s, rehearsed.ended_s)
    return max(life.up_s, rehearsed.began_s), down_s


def _first_use(history: RecoveryHistory) -> dict[str, float]:
    """Node id -> when it first was in a generation that trained."""
    first: dict[str, float] = {}
    for stretch in history.stretches():
        for node in _nodes(history, stretch.generation):
            first.setdefault(node, stretch.start_s)
    return first


def _nodes(history: RecoveryHistory, index: int | None) -> frozenset[str]:
    """The nodes of a generation's members."""
    if index is None or index < 0:
        return frozenset()
    return frozenset(
        history.homes[rank] for rank in history.generations[index].members if rank in history.homes
    )


def parts(regrouped: Regrouped) -> tuple[float, ...]:
    """Seconds of each of `PARTS`."""
    seconds = part_seconds(regrouped)
    return tuple(seconds[part] for part in PARTS)
