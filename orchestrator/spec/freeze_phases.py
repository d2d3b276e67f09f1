"""Settles TimelyFreeze's phases from the spec: unset ones get their defaults, impossible ones are refused."""

from __future__ import annotations

from typing import get_args

from planner.freezing import AUTO, Budget, Phases
from workers.config import FreezeConfig, OptimizerConfig
from workers.protocol.errors import JobError

METHODS: tuple[str, ...] = get_args(FreezeConfig.model_fields["method"].annotation)
SHARE = 10
"""Warm-up and ramp last a tenth of the job by default."""
MONITORING_STEPS, FEWER_STEPS = 10, 4
"""Steps of monitoring, half of which freeze everything and lose their updates; fewer with r_max = auto, which goes on
comparing times."""


def monitoring_steps(r_max: Budget) -> int:
    """Steps of monitoring where nobody says how many."""
    return FEWER_STEPS if r_max == AUTO else MONITORING_STEPS


def settle_phases(freeze: FreezeConfig, optimizer: OptimizerConfig, steps: int) -> FreezeConfig:
    """`freeze` with a number for every phase of its method, in a job of `steps` steps.

    Defaults shrink to fit a short job: the warm-up takes at most half of it, monitoring half of the rest. Given values
    are never changed.

    Raises:
        JobError: the phases are out of order, or do not end before the job does; or a budget is given where the job
            chooses.
    """
    if freeze.method == AUTO and freeze.r_max != AUTO:
        raise JobError(
            f'freeze.method = "auto" finds out how much to freeze, and freeze.r_max = {freeze.r_max:g} is given: leave'
            ' that out, or set freeze.method = "timelyfreeze"'
        )
    if "warm_up" not in freeze.used:
        return freeze
    warm_up, monitoring, ramp = freeze.warm_up, freeze.monitoring, freeze.ramp
    if warm_up is None:
        warm_up = min(optimizer.warmup_steps or steps // SHARE, steps // 2)
    if not freeze.timely:
        if warm_up >= steps:
            raise JobError(
                f"freeze.warm_up = {warm_up} leaves nothing to freeze in job.steps = {steps}: set job.steps to"
                f" more than {warm_up}, or, in a job that is not resumed, lower freeze.warm_up or leave it unset"
            )
        return freeze.model_copy(update={"warm_up": warm_up})
    if monitoring is None:
        monitoring = warm_up + min(monitoring_steps(freeze.r_max), max(2, (steps - warm_up) // 2))
    if ramp is None:
        ramp = max(monitoring, min(monitoring + steps // SHARE, steps))
    try:
        phases = Phases(warm_up=warm_up, monitoring=monitoring, ramp=ramp)
    except ValueError as error:
        raise JobError(f"[freeze]: {error}") from error
    if phases.ramp > steps:
        raise JobError(
            f"[freeze]: the phases are longer than the job: warm_up = {warm_up}, monitoring = {monitoring}, ramp ="
            f" {ramp} are steps, and job.steps = {steps}: set job.steps to {ramp} at least, or, in a job that is not"
            f" resumed, all three to {steps} at most or freeze.method to none"
        )
    return freeze.model_copy(update={"warm_up": warm_up, "monitoring": monitoring, "ramp": ramp})
