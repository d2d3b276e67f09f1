"""Predicted step of a job with other ranks, another schedule, cut or r_max, a slower device or another link.

Both cases are simulated from the job's profile: today's plan, and the changed one. Pure: a view and a profile in,
predictions out; it asks no rank and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.commands.change import KEEP, Impossible, WhatIfChange
from orchestrator.history.job_view import JobView
from orchestrator.prepare.planning import as_followed, as_planned
from orchestrator.spec.job_spec import Spec
from planner.freeze.decision import profiled
from planner.freezing import Budget
from planner.plan import Plan, PlanError
from planner.profile import Cluster, Profile
from planner.schedule.expand import schedule_of
from planner.schedule.registry import families
from planner.search.evaluate import Evaluator
from planner.search.search import END_TO_END, QUICK, choose_among
from planner.search.shapes import shapes
from planner.simulation.predict import Prediction, predict
from planner.simulation.resized_cluster import resized
from planner.wording import counted
from workers.config import ElasticConfig
from workers.protocol.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step as it is predicted."""

    prediction: Prediction
    """With the ratios frozen, if any."""
    unfrozen_s: float
    """The step without the program's ratios."""
    r_max: Budget
    ratios: tuple[tuple[int, int, float], ...]
    """(stage, microbatch, frozen share of weight-gradient time)."""
    whole: int = 0
    """Layers from the input up that are frozen as a whole."""

    @property
    def plan(self) -> Plan:
        return self.prediction.plan

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self.plan.layers_per_stage


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Today's step, and the changed one."""

    now: Case
    then: Case

    @property
    def same_shape(self) -> bool:
        """Whether only the cut may differ: then the ranks can take it up while they train."""
        now, then = self.now.plan, self.then.plan
        return (now.schedule, now.chunks, now.stage_ranks) == (then.schedule, then.chunks, then.stage_ranks)


def what_if(view: JobView, profile: Profile | None, change: WhatIfChange) -> WhatIf:
    """Simulate today's plan of `view` and the one that `change` leads to.

    Raises:
        Impossible: no plan meets the change; says why.
        JobError: there is no profile or plan to simulate.
    """
    plan = view.followed or view.plan
    if profile is None or plan is None:
        what = (
            "no plan yet" if plan is None else "no profile in its folder, or the folder is not visible here"
        )
        raise JobError(f"job {view.job!r} has {what}: nothing can be simulated")
    if plan.schedule not in families():
        raise JobError(f"the schedule {plan.schedule} is a table of your own, which is not simulated here")
    try:
        # The settings that the job follows now, which a request may have changed.
        spec = Spec.model_validate({**view.spec, "freeze": dict(view.freeze_section_at(view.step))})
        planned = as_followed(profile, spec, view.freeze)
        prefix = view.freeze.prefix
        whole = 0 if prefix is None else prefix.layers
        today = replace(planned, cluster=_sized(planned.cluster, plan.pipeline_ranks))
        r_max = spec.freeze.r_max if spec.freeze.timely else 0.0
        least = spec.freeze.least_update
        now = _case(today, plan, r_max, spec, least, whole)
    except ValueError as error:
        raise JobError(f"today's plan cannot be simulated: {error}") from error
    try:
        then_r_max = r_max if change.r_max is None else change.r_max
        domains = [*map(view.ranks.domain, view.ranks.members)]
        then_planned, then_whole = planned, whole
        if change.frozen is not None:
            # Another request may train the layers again, so their memory counts.
            then_whole = change.frozen
            then_planned = as_planned(profile, spec).with_prefix(then_whole)
            plan = replace(plan, frozen=min(plan.frozen, then_whole))
        then = _case(
            *_changed(then_planned, plan, change, domains, spec.elastic),
            then_r_max,
            spec,
            change.least_update or least,
            then_whole,
        )
    except ValueError as error:
        raise Impossible(str(error)) from error
    return WhatIf(now=now, then=then)


def _changed(
    planned: Profile, plan: Plan, change: WhatIfChange, domains: Sequence[str], elastic: ElasticConfig
) -> tuple[Profile, Plan]:
    """The profile and the plan of the changed case.

    Args:
        domains: per place, the failure domain of its rank; further places are on nodes of their own.
        elastic: says which copies each layer has.
    """
    ranks = plan.pipeline_ranks if change.ranks is None else change.ranks
    profile = replace(planned, cluster=_disturbed(_sized(planned.cluster, ranks), change))
    name = plan.schedule if change.schedule is None else change.schedule
    pipelines = plan.pipeline_count if change.pipelines is None else change.pipelines
    if pipelines > plan.replicas:
        raise PlanError(
            f"{counted(pipelines, 'pipeline')} would have {counted(plan.replicas, 'replica')} to execute: at least one"
            " each"
        )
    same_shape = (ranks, pipelines, name) == (plan.pipeline_ranks, plan.pipeline_count, plan.schedule)
    if change.cut == KEEP and not same_shape:
        raise JobError(
            "today's cut is for today's ranks and schedule: choose the best cut, or give its layers"
        )
    if change.cut == KEEP:
        return profile, plan
    built, refused = shapes(
        layers=len(profile.model.layers),
        most_ranks=ranks,
        ranks=ranks,
        name=name,
        chunks=plan.chunks if same_shape else None,
        microbatches=plan.microbatches,
    )
    if not built:
        raise PlanError("; ".join(dict.fromkeys(each.why for each in refused)))
    places = ranks * pipelines
    domains = [*domains, *(f"new {place}" for place in range(places))][:places]
    evaluators = [
        Evaluator(
            profile,
            shape,
            replicas=plan.replicas,
            recompute=plan.recompute,
            frozen=plan.frozen,
            pipelines=pipelines,
            shard=plan.shard,
            # Which rank keeps a copy of which layer depends on the cut.
            domains=domains if elastic.peer_copies else None,
            copies=elastic.peer_copies,
            copy_every=elastic.copy_every,
        )
        for shape in built
    ]
    cut = END_TO_END if isinstance(change.cut, str) else change.cut
    return profile, choose_among(evaluators, cut, effort=QUICK).plan


def _sized(measured: Cluster, ranks: int) -> Cluster:
    """`measured` with `ranks` ranks; more than were measured are typical ones, on one machine."""
    if ranks > len(measured.devices):
        return resized(measured, [0] * ranks)
    return measured


def _disturbed(cluster: Cluster, change: WhatIfChange) -> Cluster:
    """`cluster` with the changed device and link.

    Raises:
        JobError: it has no such rank.
    """
    ranks = len(cluster.devices)
    for rank in (change.slow_rank, change.source, change.target):
        if rank is not None and rank >= ranks:
            raise JobError(f"there is no rank {rank}: the profile has the ranks 0 to {ranks - 1}")
    devices = tuple(
        replace(device, slowdown=device.slowdown * change.slowdown) if rank == change.slow_rank else device
        for rank, device in enumerate(cluster.devices)
    )
    pair = {change.source, change.target}
    links = tuple(
        tuple(
            replace(link, bytes_per_s=link.bytes_per_s * change.bandwidth)
            if link is not None and {source, target} == pair
            else link
            for target, link in enumerate(row)
        )
        for source, row in enumerate(cluster.links)
    )
    return replace(cluster, devices=devices, links=links)


def _case(profile: Profile, plan: Plan, r_max: Budget, spec: Spec, least: float, whole: int) -> Case:
    """The predicted step of `plan`, with what the freeze program freezes.

    Args:
        whole: layers that the profile has as frozen as a whole.
    """
    schedule = schedule_of(plan)
    unfrozen = predict(profile, plan, schedule)
    freezable = any(layer.weight_grad_s for layer in profile.model.layers)
    if r_max == 0 or not freezable:
        return Case(prediction=unfrozen, unfrozen_s=unfrozen.step_s, r_max=0.0, ratios=(), whole=whole)
    solution, ratios = profiled(profile, plan, schedule, r_max, least, adaptive=spec.optimizer.adaptive)
    frozen = predict(profile, plan, schedule, ratios)
    return Case(
        prediction=frozen, unfrozen_s=unfrozen.step_s, r_max=r_max, ratios=solution.ratios, whole=whole
    )
