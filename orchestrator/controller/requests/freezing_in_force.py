"""Freezing of a job as it is now, from its spec and its view: the settings in force, and what is still to be solved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.history.freeze_record import FreezeRecord
from orchestrator.history.job_view import JobView
from planner.freezing import (
    Budget,
    FreezeOverrides,
    FreezePlan,
    Phases,
    has_program,
    keeps_statistics,
    prefix_rule,
)
from workers.config import FreezeConfig

GRACE_STEPS = 2
"""After monitoring, for its last timelines to arrive; later ones were lost with a failed rank."""


def current_settings(spec: FreezeConfig, view: JobView) -> FreezeOverrides:
    """Return the newest settings, without phases, whether or not the ranks follow them yet."""
    proposed, newest = view.freeze.proposed, view.freeze.newest
    for plan in (proposed, newest):
        if plan is not None and plan.control is not None:
            return replace(plan.control, phases=None, since=None, solved=False)
    return FreezeOverrides(
        method=spec.method,
        r_max=spec.r_max,
        alpha=spec.alpha if prefix_rule(spec.method) == "pipetransformer" else None,
        prefix=spec.prefix,
    )


def open_monitoring(spec: FreezeConfig, view: JobView) -> FreezeOverrides | None:
    """Return what the ranks follow if ratios are still to be solved from the times of steps that are, or will be,
    monitored: with another cut these times would be void. None: there is nothing to monitor any more."""
    control = _unsolved(spec, view)
    return None if control is None or _monitored(control, view.step) else control


def _unsolved(spec: FreezeConfig, view: JobView) -> FreezeOverrides | None:
    """Return what the ranks follow if their monitoring has no solution yet; None: there is one, or no monitoring."""
    proposed, newest = view.freeze.proposed, view.freeze.newest
    if proposed is not None:
        control = proposed.control
        return control if control is not None and control.phases is not None and not control.solved else None
    if newest is None:
        if spec.phases is None:
            return None
        return FreezeOverrides(method=spec.method, r_max=spec.r_max, phases=spec.phases, since=1)
    control = newest.control
    if control is None or control.phases is None or control.solved:
        return None
    return replace(control, since=control.since or newest.start)


def _monitored(control: FreezeOverrides, step: int) -> bool:
    """Whether the monitoring of `control` has ended, and its last timelines have arrived."""
    assert control.phases is not None
    return (
        control.since is not None and step >= shifted(control.phases, control.since).monitoring + GRACE_STEPS
    )


def budget_in_force(spec: FreezeConfig, view: JobView, *, replayed: bool) -> Budget | None:
    """Return r_max of the freeze program that the ranks follow; None: they follow none, or will not for long."""
    newest = view.freeze.newest
    if replayed or newest is None or view.freeze.proposed is not None:
        return None
    control = newest.control
    now = current_settings(spec, view)
    if not has_program(now.method) or (control is not None and not control.solved):
        return None
    phases = spec.phases if control is None or control.phases is None else control.phases
    return None if phases is None else now.r_max


def open_question(spec: FreezeConfig, view: JobView) -> tuple[FreezeConfig, FreezeOverrides | None] | None:
    """Return the settings whose freeze program the planner is to solve, and what its plan says of them; None: there is
    none to solve, or its steps are not known yet."""
    proposed, newest = view.freeze.proposed, view.freeze.newest
    if proposed is not None and proposed.control is not None:
        return None
    if newest is None:
        return (spec, None) if spec.timely else None
    control = newest.control
    if control is None or control.phases is None or control.solved:
        return None
    since = control.since or newest.start
    return spec.model_copy(update=newest.settings), replace(control, since=since, solved=True)


def method_to_plan_for(freeze: FreezeRecord, replayed: Iterable[FreezePlan] = ()) -> str:
    """Return the freeze method whose statistics every plan must have room for: of the one that the ranks follow and
    those that they are to follow, the first that keeps any.

    Args:
        replayed: the freeze plans of the log that the job follows, if it does.
    """
    coming = [*replayed, *([freeze.proposed] if freeze.proposed is not None else [])]
    methods = [freeze.method, *(plan.control.method for plan in coming if plan.control is not None)]
    return max(methods, key=keeps_statistics)


def shifted(phases: Phases, since: int) -> Phases:
    """Return the phases in the job's steps, of `phases` whose step 1 is `since`."""
    before = since - 1
    return Phases(
        warm_up=before + phases.warm_up, monitoring=before + phases.monitoring, ramp=before + phases.ramp
    )
