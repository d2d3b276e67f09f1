"""Decides what a request to change freezing gives the ranks, from what the job has measured so far. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.controller.requests.freezing_in_force import (
    budget_in_force,
    current_settings,
    method_to_plan_for,
    open_monitoring,
    shifted,
)
from orchestrator.history.freeze_history import observation
from orchestrator.history.job_view import JobView
from orchestrator.spec.freeze_phases import METHODS, SHARE, monitoring_steps
from orchestrator.spec.freeze_prefix import check_prefix, check_prefix_fits
from planner.freeze.decision import FreezeQuestion
from planner.freeze.monitoring import MonitoringError, Observation, measure
from planner.freezing import (
    AUTO,
    Budget,
    FreezeOverrides,
    FreezePlan,
    Phase,
    Phases,
    budget_text,
    has_program,
    keeps_statistics,
    prefix_rule,
    works_above_prefix,
)
from planner.ir import Schedule
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.schedule.expand import schedule_after
from planner.schedule.table_format import CSV_PREFIX
from planner.search.replan import Replanner
from planner.wording import counted
from workers.config import FreezeConfig
from workers.protocol.errors import JobError

FEWEST_STEPS = 8
"""Steps that must be left to begin monitoring: fewer do not pay for it."""


@dataclass(frozen=True, kw_only=True)
class WantedFreezing:
    """The settings that someone asked for."""

    method: str | None
    """None: as it is."""
    r_max: Budget | None
    alpha: float | None = None
    prefix: int | None = None
    least_update: float | None = None
    chosen: bool = False
    """By the job itself."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """The job as it trains now."""

    spec: FreezeConfig
    """Its resolved `[freeze]` section."""
    adaptive: bool
    """Whether its update rule divides by the size of gradients."""
    view: JobView
    plan: Plan
    schedule: Schedule
    coming: Plan
    """The plan that the ranks follow once all requested moves are over."""
    profile: Profile | None
    """Profile as measured."""
    replanner: Replanner
    """Replanner in force. Knows the memory of the devices, where the job has a profile."""
    domains: tuple[str, ...]
    """Per place, the node of its rank."""
    replayed: bool
    """It follows the decisions of a log."""
    slowdowns: tuple[float | None, ...] | None = None
    """Per place, as far as they are known."""

    @property
    def whole(self) -> tuple[Plan, Schedule]:
        """The plan, and its schedule, with the backward passes of all stages."""
        return self.above(0)

    def above(self, prefix: int) -> tuple[Plan, Schedule]:
        """The plan, and its schedule, with at least the backward passes above `prefix` layers that are frozen as a
        whole."""
        if self.plan.frozen <= prefix:
            return self.plan, self.schedule
        plan = replace(self.plan, frozen=prefix)
        return plan, schedule_after(self.replanner.schedule, plan)


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """The ranks get new settings with nothing to solve first."""

    control: FreezeOverrides


@dataclass(frozen=True, kw_only=True)
class Solve:
    """The freeze program is to be solved again; the ranks get its ratios with the settings."""

    control: FreezeOverrides
    question: FreezeQuestion
    observations: tuple[Observation, ...]


def decided(wanted: WantedFreezing, job: Running) -> Adopt | Solve:
    """Return what `wanted` takes.

    Raises:
        JobError: it cannot be done, or changes nothing; says why and what to do.
    """
    if job.replayed:
        raise JobError(
            "the job replays the freezing of a log and decides nothing itself: freeze in another run"
        )
    control = _wanted_settings(wanted, job)
    method, r_max = control.method, control.r_max
    if not has_program(method):
        return Adopt(control=control)
    prefix = _prefix_under(control, job)
    same_prefix = prefix == job.view.freeze.frozen_layers
    if same_prefix and (open_control := open_monitoring(job.spec, job.view)) is not None:
        return Adopt(
            control=replace(
                open_control,
                method=method,
                r_max=r_max,
                least_update=control.least_update,
                alpha=control.alpha,
                prefix=control.prefix,
                chosen=control.chosen,
            )
        )
    plan, schedule = job.above(prefix)
    for since, phases in _measured_phases(job):
        control = replace(control, phases=phases, since=since, solved=True)
        absolute = shifted(phases, since)
        observations = _observations(job, absolute)
        if any(job.view.freeze.prefix_at(seen.step) != prefix for seen in observations):
            continue
        try:
            measure(schedule, absolute, observations)
        except MonitoringError:
            continue
        question = FreezeQuestion(
            plan=plan,
            schedule=schedule,
            phases=absolute,
            r_max=r_max,
            least_update=_least(control, job.spec),
            adaptive=job.adaptive,
            # The job weighed it by these.
            energies=job.view.freeze.energies if control.chosen else (),
            profile=None if job.profile is None else job.profile.with_prefix(prefix),
        )
        return Solve(control=control, question=question, observations=observations)
    if prefix_rule(method) is not None and (by_profile := _by_profile(control, prefix, job)) is not None:
        return by_profile
    return Adopt(control=replace(control, phases=_phases_from_here(job, r_max), since=None, solved=False))


def _by_profile(control: FreezeOverrides, prefix: int, job: Running) -> Solve | None:
    """The program of `control` above another prefix than was monitored, by the profile's times and the gradients told
    so far; None: the ranks follow no program yet."""
    replanner = replace(job.replanner, frozen=prefix, released=min(job.replanner.released, prefix), kept=0)
    profile = replanner.profile_on(job.domains, job.slowdowns)
    found = question_for_new_times(job, profile)
    if found is None:
        return None
    question, now = found
    phases, since = (job.spec.phases, 1) if now is None else (now.phases, now.since)
    plan, schedule = job.above(prefix)
    question = replace(
        question,
        plan=plan,
        schedule=schedule,
        r_max=control.r_max,
        least_update=_least(control, job.spec),
        profile=profile.with_prefix(prefix),
    )
    control = replace(control, phases=phases, since=since, solved=True)
    return Solve(control=control, question=question, observations=())


def question_for_new_times(
    job: Running, profile: Profile
) -> tuple[FreezeQuestion, FreezeOverrides | None] | None:
    """Return the freeze program that the ranks follow, for times that have changed since its solution, and what its
    plan says of the settings; None: they follow none.

    Args:
        profile: of the ranks as they are now, a device for each place. The steps that were monitored do not count.
    """
    r_max = budget_in_force(job.spec, job.view, replayed=job.replayed)
    # Without the gradients that it was solved by, layers would count otherwise.
    if r_max is None or (r_max == AUTO and not any(job.view.freeze.energies)):
        return None
    newest, phases, since = job.view.freeze.newest, job.spec.phases, 1
    assert newest is not None, "ranks that follow a program have its plan"
    control = newest.control
    if control is not None and control.phases is not None:
        phases, since = control.phases, control.since or newest.start or 1
        control = replace(control, since=since)
    assert phases is not None, "a method with a program has phases"
    now = current_settings(job.spec, job.view)
    prefix, above = _prefix_under(now, job), prefix_rule(now.method) is not None
    plan, schedule = job.above(prefix)
    question = FreezeQuestion(
        plan=plan,
        schedule=schedule,
        phases=shifted(phases, since),
        r_max=r_max,
        least_update=job.spec.least_update if control is None else _least(control, job.spec),
        adaptive=job.adaptive,
        # Those that it was solved by first are of another prefix.
        energies=job.view.freeze.energies if r_max == AUTO or above else (),
        confirmed=job.view.freeze.confirmed,
        profile=profile.with_prefix(prefix),
    )
    return question, control


def nothing_frozen(plan: Plan) -> tuple[tuple[float, ...], ...]:
    """Ratios of zero for every layer and microbatch."""
    return ((0.0,) * plan.microbatches,) * plan.layers[-1][1]


def described(control: FreezeOverrides) -> str:
    """Describe the change in words."""
    if control.method == "none":
        return "freezes nothing from a commit on"
    named = control.named
    if control.phases is None or control.solved:
        return f"freezes by {named} from a commit on"
    if control.since is None:
        steps = counted(control.phases.monitoring, "step")
        return f"freezes by {named}: monitors {steps} from a commit on, then solves"
    return f"freezes by {named} once its monitoring has ended"


def _wanted_settings(wanted: WantedFreezing, job: Running) -> FreezeOverrides:
    """Return the settings, without phases.

    Raises:
        JobError: they are no settings, or those that the job has.
    """
    now = current_settings(job.spec, job.view)
    if all(value is None for key, value in vars(wanted).items() if key != "chosen"):
        raise JobError(
            "a freeze request names a method, its setting (r_max, least_update, alpha or prefix), or both"
        )
    method = now.method if wanted.method is None else wanted.method
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise JobError(f"{method!r} is no freeze method: {hint}There are {', '.join(METHODS)}")
    if wanted.r_max is not None:
        budget = wanted.r_max
        if budget != AUTO and not (math.isfinite(budget) and 0.0 <= budget <= 1.0):
            raise JobError(
                f"r_max = {budget:g} is no share: give the largest mean freeze ratio of a stage, from 0 to 1, or auto"
            )
        if method == AUTO and budget != AUTO:
            raise JobError(
                f"r_max = {budget:g} does not go with method auto, which finds out how much to freeze: leave it out, or"
                " name timelyfreeze"
            )
        if not has_program(method):
            raise JobError(
                f"r_max = {budget_text(budget)} changes nothing with method {method}: only a timelyfreeze method has a"
                " budget; name one with it"
            )
    if (method == AUTO or works_above_prefix(method)) and job.replanner.profile is None:
        raise JobError(
            f"method {method} weighs what layers take, and this job has not measured its model: start it with"
            f" freeze.method = {method!r}, or choose timelyfreeze"
        )
    _check_least(wanted, now, method)
    _check_prefix(method, wanted, now, job)
    then = replace(
        now,
        method=method,
        r_max=now.r_max if wanted.r_max is None else wanted.r_max,
        alpha=now.alpha if wanted.alpha is None else float(wanted.alpha),
        prefix=now.prefix if wanted.prefix is None else wanted.prefix,
        least_update=now.least_update if wanted.least_update is None else wanted.least_update,
        chosen=wanted.chosen and now.chooses,
    )
    if method == AUTO:
        then = replace(then, r_max=AUTO)
    if then.named == now.named and then.chosen == now.chosen:
        raise JobError(f"the freeze method is {then.named} already: there is nothing to change")
    _check_thawed(now, then, job)
    _check_memory(method, job)
    return then


def _prefix_under(control: FreezeOverrides, job: Running) -> int:
    """Layers, from the input up, that are frozen as a whole once the ranks follow `control`, as far as it is known."""
    now, rule = current_settings(job.spec, job.view), prefix_rule(control.method)
    if rule is not None and (rule, control.prefix) == (prefix_rule(now.method), now.prefix):
        return job.view.freeze.frozen_layers
    return control.prefix or 0 if rule == "prefix" else 0


def _check_least(wanted: WantedFreezing, now: FreezeOverrides, method: str) -> None:
    """Raises:
    JobError: the least update that is wanted is no share, or nothing looks at it.
    """
    least = wanted.least_update
    if least is None:
        return
    if not 0.0 < least <= 1.0:
        raise JobError(
            f"least_update = {least:g} is no share: give the least share of a step's progress that is to be left, more"
            " than 0 and at most 1"
        )
    budget = now.r_max if wanted.r_max is None else wanted.r_max
    if budget != AUTO or not has_program(method):
        raise JobError(
            f"least_update = {least:g} changes nothing with method {method} and r_max = {budget_text(budget)}: give"
            " r_max auto with it"
        )


def _least(control: FreezeOverrides, spec: FreezeConfig) -> float:
    return spec.least_update if control.least_update is None else control.least_update


def _check_prefix(method: str, wanted: WantedFreezing, now: FreezeOverrides, job: Running) -> None:
    """Raises:
    JobError: what is wanted of the prefix does not go with `method` or with the model.
    """
    rule = prefix_rule(method)
    for key, of_method in (("alpha", "pipetransformer"), ("prefix", "prefix")):
        value = getattr(wanted, key)
        if value is not None and rule != of_method:
            raise JobError(
                f"{key} = {value:g} changes nothing with method {method}: it is for {of_method} and"
                f" timelyfreeze+{of_method}; name one of them with it"
            )
    if wanted.alpha is not None and not 0.0 < wanted.alpha < 1.0:
        raise JobError(
            f"alpha = {wanted.alpha:g} is no share: give the largest share of the layers still trained that one check"
            " freezes, more than 0 and less than 1"
        )
    if wanted.prefix is not None and wanted.prefix < 0:
        raise JobError(f"prefix = {wanted.prefix} is no number of layers: give 0 or more")
    if rule == "prefix" and wanted.prefix is None and prefix_rule(now.method) != "prefix":
        raise JobError(f"method {method} needs to know how many layers to freeze: give prefix too")
    prefix = now.prefix if wanted.prefix is None else wanted.prefix
    if rule != "prefix":
        keys = {"prefix": None, "schedule": ()}
    else:
        keys = {} if prefix is None else {"prefix": prefix, "schedule": ()}
    then = job.spec.model_copy(update={"method": method, **keys})
    check_prefix(then, table=job.plan.schedule.startswith(CSV_PREFIX))
    check_prefix_fits(then, job.plan.layers[-1][1])


def _check_thawed(now: FreezeOverrides, then: FreezeOverrides, job: Running) -> None:
    """Raises:
    JobError: layers that would be trained again do not fit the memory that the job's layout has for them.
    """
    replanner, stays = job.replanner, 0
    rule = prefix_rule(then.method)
    if rule == "prefix" and then.prefix is not None:
        stays = then.prefix
    elif then.method == now.method or (rule is not None and rule == prefix_rule(now.method)):
        stays = replanner.released
    if stays >= replanner.released:
        return
    thawed = replace(replanner, frozen=stays, released=stays)
    try:
        for plan in (job.plan, job.coming):
            thawed.check_memory(replace(plan, frozen=min(plan.frozen, stays)), job.domains)
    except PlanError as error:
        raise JobError(
            f"layers that are frozen now would be trained again, and do not fit: {error}; or keep them frozen"
        ) from error


def _check_memory(method: str, job: Running) -> None:
    """Check that what `method` keeps fits the devices, as far as the job has a profile or a limit.

    Raises:
        JobError: it does not, or nobody knows.
    """
    if not keeps_statistics(method):
        return
    keeps = f"{method} keeps four bytes for each weight"
    profile = job.replanner.profile
    if profile is not None:
        if keeps_statistics(method_to_plan_for(job.view.freeze)):
            return
        with_them = replace(job.replanner, profile=profile.frozen_by(method))
        try:
            with_them.check_memory(job.plan, job.domains)
            with_them.check_memory(job.coming, job.domains)
        except PlanError as error:
            raise JobError(f"{keeps}, and they do not fit: {error}; or choose timelyfreeze") from error
    elif (
        not keeps_statistics(job.spec.method)
        and job.view.spec.get("cluster", {}).get("memory_per_rank_bytes") is not None
    ):
        raise JobError(
            f"{keeps}, which the plan was not checked for under cluster.memory_per_rank: start the job with"
            f" freeze.method = {method!r}, or choose timelyfreeze"
        )


def _measured_phases(job: Running) -> list[tuple[int, Phases]]:
    """Return the phases that the job has had, the newest first, each with its step 1."""
    found: list[tuple[int, Phases]] = []
    for _, plan in sorted(job.view.freeze.plans.items(), reverse=True):
        control = plan.control
        if control is not None and control.phases is not None and plan.start is not None:
            found.append((control.since or plan.start, control.phases))
    if job.spec.phases is not None:
        found.append((1, job.spec.phases))
    return list(dict.fromkeys(found))


def _observations(job: Running, phases: Phases) -> tuple[Observation, ...]:
    """Return the timelines of the steps that were monitored in `phases`, with the plan's cut."""
    history = job.view.freeze_history()
    return tuple(
        observation(report)
        for report in history.monitored_with(job.plan)
        if phases.of(report.step) in (Phase.UPPER, Phase.LOWER)
        and _phases(job.view.freeze_section_at(report.step)) == phases
    )


def _phases(section: Mapping[str, Any]) -> Phases | None:
    return FreezeConfig.model_validate(section).phases


def _phases_from_here(job: Running, r_max: Budget) -> Phases:
    """Return the phases of monitoring for `r_max` that begins with the next step, as a spec's unset ones would be.

    Raises:
        JobError: too few steps are left.
    """
    steps = job.view.last_step
    left = steps - job.view.step
    if left < FEWEST_STEPS:
        raise JobError(
            f"the job has {left} of {counted(steps, 'step')} left and no monitored times of its plan: monitoring needs"
            f" at least {FEWEST_STEPS}; a method without a freeze program (apf, autofreeze) needs none"
        )
    monitoring = min(monitoring_steps(r_max), max(2, left // 4))
    return Phases(warm_up=0, monitoring=monitoring, ramp=min(monitoring + steps // SHARE, left))


def plan_of(control: FreezeOverrides, plan: Plan, *, epoch: int, version: int) -> FreezePlan:
    """Return the freeze plan by which the ranks take up settings that need no solution."""
    return FreezePlan(epoch=epoch, version=version, ratios=nothing_frozen(plan), control=control)
