"""Reports of a rank on a step, from what it measured and what the commit decided. Values only; it sends nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import median

from planner.course import Leg
from planner.ir import Action, ActionKind
from planner.observed import StageTime, StepTimes
from workers.commit.commit import CommitDecision
from workers.data.sampling import samples_digest
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.reports import ActionSpan, MemoryLow, PrefixFrozen, StepReport, TimelineReport
from workers.step.engine import Window
from workers.step.generation import GenerationSetup
from workers.transport.channel import Channel

LEAST_IN_HALF = 2
"""Actions of a kind that each half of a window must have."""
OUTLIER = 3.0
"""Most that an action may count for in a half, as a multiple of the median of its kind."""


def step_report(
    setup: GenerationSetup, leg: Leg, generation: int, decision: CommitDecision, step_s: float
) -> StepReport:
    """The report of a committed step, which every rank makes alike.

    Args:
        leg: that the step belongs to.
        step_s: how long the step took here.
    """
    samples = leg.batch
    return StepReport(
        generation=generation,
        step=decision.step,
        loss=decision.loss,
        grad_norm=decision.grad_norm,
        lr=decision.lr,
        samples=samples,
        tokens=samples * setup.data.tokens_per_sample,
        step_s=step_s,
        bubble=max(0.0, 1.0 - decision.busy_s / step_s),
        skipped=decision.skipped,
        gradient_energy=decision.gradient_energy,
        effective_update=decision.effective_update,
        committed_s=time.time(),
        samples_digest=samples_digest(decision.samples),
    )


def timeline_report(
    setup: GenerationSetup, step: int, window: Window, step_s: float, norms: Sequence[float] = ()
) -> TimelineReport:
    """When this rank did what in the window of `step`.

    Args:
        norms: per layer, of its gradient, if the planner is to know them.
    """
    return TimelineReport(
        step=step,
        rank=setup.place,
        step_s=step_s,
        spans=window.spans,
        memory_bytes=setup.device.memory_bytes(),
        energies=tuple(norm * norm for norm in norms),
    )


def step_times(
    setup: GenerationSetup, channel: Channel, step: int, window: Window, frozen: bool, prefix: int
) -> StepTimes:
    """The times of `step` on this rank, for those who look for slow ranks and links.

    Args:
        frozen: whether the step may leave gradients out.
        prefix: layers that it leaves out of the backward pass.
    """
    # A forward pass that read or wrote what is kept tells nothing of its layers.
    spans = window.spans
    if setup.kept.used:
        spans = tuple(span for span in spans if not _is_first_forward(span))
    return StepTimes(
        rank=setup.rank,
        place=setup.place,
        step=step,
        plan=setup.plan.key,
        times=stage_times(spans),
        halves=half_times(spans),
        surroundings=setup.surroundings(),
        frozen=frozen,
        prefix=prefix,
        links=channel.link_times(),
        waited_s=window.waited_s,
    )


def _is_first_forward(span: ActionSpan) -> bool:
    action = Action.parse(span.action)
    return action.kind is ActionKind.FORWARD and action.stage == 0


def prefix_report(
    setup: GenerationSetup,
    prefix: FrozenPrefix,
    step: int = 0,
    norms: tuple[float, ...] = (),
    leg: Leg | None = None,
) -> PrefixFrozen:
    """The layers that the step after `step` freezes, which are not those of that step.

    Args:
        leg: of the batch's course, if another one begins with that step.
        norms: per layer, of its gradient in `step`.
    """
    names, layers = setup.definition.names, prefix.layers
    frozen = names[:layers]
    across = [
        {ref.layer for ref in group}
        for group in setup.definition.ties
        if not {ref.layer for ref in group} <= {*frozen}
    ]
    return PrefixFrozen(
        step=step + 1,
        layers=layers,
        bound=prefix.bound,
        norms=norms,
        names=frozen,
        tied=tuple(name for name in frozen if any(name in uses for uses in across)),
        leg=leg,
    )


def memory_low(setup: GenerationSetup, step: int, left_bytes: int, reserve_bytes: int) -> MemoryLow:
    """The device has less memory left in `step` than it should keep free."""
    return MemoryLow(
        rank=setup.rank,
        place=setup.place,
        plan=setup.plan.key,
        step=step,
        left_bytes=left_bytes,
        reserve_bytes=reserve_bytes,
        seen_s=time.time(),
    )


def stage_times(spans: Iterable[ActionSpan]) -> tuple[StageTime, ...]:
    """Seconds and number of the actions of each kind of each stage."""
    return tuple(_added(stage, kind, seconds) for (stage, kind), seconds in _by_kind(spans))


def half_times(spans: Iterable[ActionSpan]) -> tuple[tuple[StageTime, ...], ...]:
    """The same for the earlier and the later half of each kind's actions: whether a rank was slow in both tells a
    lasting cause from a moment's. An action that takes longer than `OUTLIER` times the median counts for that.

    Empty if a kind has too few actions.
    """
    earlier, later = list[StageTime](), list[StageTime]()
    for (stage, kind), seconds in _by_kind(spans):
        middle = len(seconds) // 2
        if middle < LEAST_IN_HALF:
            return ()
        for half, taken in ((earlier, seconds[:middle]), (later, seconds[middle:])):
            most = OUTLIER * median(taken)
            half.append(_added(stage, kind, [min(one, most) for one in taken]))
    return (tuple(earlier), tuple(later)) if earlier else ()


def _by_kind(spans: Iterable[ActionSpan]) -> list[tuple[tuple[int, str], list[float]]]:
    """(stage, kind) -> seconds of its actions, in the order in which they ran."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        action = Action.parse(span.action)
        found.setdefault((action.stage, str(action.kind)), []).append(span.end_s - span.start_s)
    return sorted(found.items())


def _added(stage: int, kind: str, seconds: Sequence[float]) -> StageTime:
    return StageTime(kind=kind, stage=stage, seconds=sum(seconds), count=len(seconds))
