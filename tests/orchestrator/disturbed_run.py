"""Logs of one job beside a neighbour, without and with adaptation: two visits, each step as long as it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from synthetic_run import START_S, plan, spec

from orchestrator.events.rehearsed import Disturbed, DisturbedSteps
from orchestrator.events.types import (
    Adapted,
    Event,
    Finished,
    Issued,
    Migrated,
    Record,
    SpeedsChanged,
    Submitted,
)
from orchestrator.history.job_view import JobView, fold
from workers.protocol.reports import StepReport

STEPS = 100
VISITS = (DisturbedSteps(first=21, last=40), DisturbedSteps(first=61, last=80))
ALONE_S, SLOW_S, BEST_S = 0.1, 0.3, 0.15
STATE = "a" * 64


def took(step: int, adapts: bool) -> float:
    """Seconds of a step. A job that adapts follows the best cut from the visit's fourth step on, and its first one
    again from the fourth step after the visit."""
    inside = any(visit.first <= step <= visit.last for visit in VISITS)
    begun = next((step - visit.first for visit in VISITS if visit.first <= step <= visit.last), 0)
    if not inside:
        return ALONE_S
    return BEST_S if adapts and begun >= 3 else SLOW_S


def moved(step: int, layer: int, source: int, target: int) -> tuple[Event, ...]:
    decision = Adapted(
        step=step - 2, moves=True, reason="it pays", now_s=0.3, then_s=0.15, cost_s=0.1, layers=(2, 3, 2, 3)
    )
    move = Migrated(
        version=2,
        layers=(layer,),
        source=(source,),
        target=(target,),
        mode="live",
        bytes=10,
        seconds=0.1,
        steps=2,
        stall_s=0.01,
        step=step,
    )
    return decision, move


def known(step: int, slowest: float) -> SpeedsChanged:
    return SpeedsChanged(
        step=step,
        slowdowns=((0, 1.0), (1, slowest)),
        changes=(f"rank 1 is {slowest} times slow",),
        lasting_steps=200,
        since=step,
    )


def disturbed(
    policy: str,
    *,
    last: int = STEPS,
    state: str = STATE,
    visits: Sequence[DisturbedSteps] = VISITS,
    logged: Mapping[int, tuple[Event, ...]] | None = None,
    told: bool = True,
) -> JobView:
    """The job that follows `policy`; it ends after step `last`.

    Args:
        logged: events after steps, instead of those of the policy.
        told: whether its log says when it was disturbed.
    """
    adapts = policy != "off"
    given = {**spec(), "adapt": {"policy": policy}}
    given["job"] = {**given["job"], "name": f"gpt-{policy}", "steps": STEPS}
    at: dict[int, tuple[Event, ...]] = {}
    if adapts:
        at = {
            4: (known(4, 1.0),),
            22: (known(22, 3.0),),
            23: moved(23, 3, 1, 0),
            42: (known(42, 1.0),),
            43: moved(43, 3, 0, 1),
            # Half of the measurements are of the step before.
            60: (known(60, 1.9),),
            62: (known(62, 2.8),),
            63: moved(63, 3, 1, 0),
        }
    at = dict(logged) if logged is not None else at
    clock_s = START_S
    records = [
        Record(time_s=clock_s, event=event)
        for event in (
            Submitted(job=f"gpt-{policy}", spec=given, resume=False, epoch=1),
            Issued(plan=plan()),
        )
    ]
    for step in range(1, last + 1):
        clock_s += took(step, adapts)
        report = StepReport(
            generation=1,
            step=step,
            loss=2.0,
            grad_norm=1.0,
            lr=0.1,
            samples=1,
            tokens=10,
            step_s=took(step, adapts),
            bubble=0.2,
            skipped=False,
            committed_s=clock_s,
        )
        records += [Record(time_s=clock_s, event=event) for event in (report, *at.get(step, ()))]
    ends: list[Event] = [Finished(step=last, stopped=last < STEPS, state_sha256=state)]
    if told:
        by = "a heavy neighbour (compute) on core 1"
        ends.append(Disturbed(by=by, rank=1, visits=tuple(visits)))
    records += [Record(time_s=clock_s, event=event) for event in ends]
    return fold(records)
