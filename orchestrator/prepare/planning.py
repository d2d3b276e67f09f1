"""Makes the first plan from a spec and, where it needs one, a profile, with its prediction and its reason.

Translates between the spec's terms and the planner's: `freshet plan` shows the result, a submitted job follows it.
Measures nothing, writes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.history.freeze_record import FreezeRecord
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.settling import Settled
from orchestrator.quantities import percent, seconds
from orchestrator.spec.freeze_prefix import dropped_prefix, lasting_prefix
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO, given_shape, pipeline_ranks
from planner.failure_domains import lacking
from planner.freeze.decision import profiled
from planner.freeze.time_to_accuracy import approximate_kappa, kappa
from planner.ir import FREEZABLE
from planner.plan import Plan, PlanError, undone_steps
from planner.profile import Profile
from planner.schedule.validate import ScheduleError
from planner.search import unmeasured
from planner.search.copies_cost import COMPARED, CopiesCost, cost_of_copies, costs_of_snapshots
from planner.search.replan import Replanner
from planner.search.search import ChosenPlan, PlanWish, choose
from planner.simulation.costs import bounds
from planner.simulation.predict import Prediction, predict
from planner.simulation.simulate import simulate
from planner.wording import counted
from workers.config import PipelineConfig
from workers.models.model_config import KEYS
from workers.protocol.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """The freezing of a plan's steps after the phases. Makespans are of one window."""

    prediction: Prediction
    """A step with these ratios."""
    r_max: float
    """The limit that the ratios were solved with, or with `AUTO` the largest mean of a stage; 0 for a method without a
    solver."""
    unfrozen_s: float
    solved_s: float
    all_frozen_s: float
    ratios: tuple[tuple[int, int, float], ...]
    """(stage, microbatch, share of weight-gradient time) of every action that computes weight gradients."""
    mean_per_stage: tuple[float, ...]
    duals: tuple[float, ...]
    """Per stage, the seconds of makespan saved per unit of the stage's r_max."""

    @property
    def kappa(self) -> float:
        """A window with these ratios over one with nothing frozen (TimelyFreeze, eq. 12). The kappa that is predicted
        after the monitoring phase also covers the time outside the window and the spread of draws."""
        return kappa(self.solved_s, self.unfrozen_s)

    @property
    def approximate_kappa(self) -> float:
        """Kappa by eq. 50, from `r_max` and the two bounds alone."""
        return approximate_kappa(self.r_max, self.unfrozen_s, self.all_frozen_s)

    @property
    def freezes(self) -> bool:
        return any(ratio > 0 for _, _, ratio in self.ratios)


def ranks_to_profile(spec: Spec, layers: int, room: int) -> int:
    """The number of ranks, over all pipelines, that a profile of the settled `spec` needs.

    A search needs as many as it may choose: the cluster has room for `room`, and no pipeline has more ranks than the
    model has `layers`.
    """
    if spec.pipeline.ranks != AUTO:
        return spec.pipeline.ranks
    pipelines = spec.pipeline.pipeline_count
    return max(1, min(layers, room // pipelines)) * pipelines


def unmeasured_plan(spec: Spec, found: ModelOutline) -> Plan:
    """Plan for given ranks, schedule and microbatches, with a cut that needs no profile.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    pipeline = spec.pipeline
    counts = None if isinstance(pipeline.partition, str) else pipeline.partition
    how = "balanced by parameter count" if counts is None else "as the spec asks"
    try:
        plan = unmeasured.unmeasured_plan(
            given_shape(spec).schedule,
            found.parameters,
            counts=counts,
            replicas=pipeline.replicas,
            pipelines=pipeline.pipelines,
            shard=pipeline.shard,
            recompute=pipeline.recomputed(len(found.layers)),
            reason=f"first plan: {counted(len(found.layers), 'layer')} cut {how}",
        )
    except ValueError as error:
        raise JobError(f"pipeline.{error}") from error
    return replace(plan, frozen=dropped_prefix(spec.freeze))


def first_plan(spec: Spec, profile: Profile) -> ChosenPlan:
    """Choose the first plan of a spec that is settled by its model and its cluster.

    Args:
        profile: profile of the spec's model, with a device for each rank.

    Raises:
        JobError: no plan fits the spec; says by how much and what would help.
    """
    check_profile(spec, profile)
    if spec.elastic.redundancy == AUTO:
        return _choose_redundancy(spec, profile)
    choice = _chosen(spec, profile)
    return replace(choice, plan=replace(choice.plan, reason=_reason(choice, profile)))


def _chosen(spec: Spec, profile: Profile) -> ChosenPlan:
    """The best plan with the spec's redundancy.

    Raises:
        JobError: as for `first_plan`.
    """
    pipeline = spec.pipeline
    ranks = pipeline_ranks(pipeline)
    planned = as_planned(profile, spec).with_prefix(lasting_prefix(spec.freeze))
    try:
        return choose(
            _for_one_pipeline(planned, ranks, pipeline),
            PlanWish(
                ranks=ranks,
                schedule=spec.table or (None if pipeline.schedule == AUTO else pipeline.schedule),
                microbatches=None if pipeline.microbatches == AUTO else pipeline.microbatches,
                partition=pipeline.partition,
                chunks=pipeline.chunks,
                replicas=pipeline.replicas,
                pipelines=pipeline.pipelines,
                shard=pipeline.shard,
                recompute=pipeline.recomputed(len(profile.model.layers)),
                frozen=dropped_prefix(spec.freeze),
                domains=_domains(spec, profile, spec.elastic.copies),
                copies=spec.elastic.copies,
                copy_every=spec.elastic.copy_every,
            ),
        )
    except ScheduleError as error:
        raise JobError(f"pipeline.schedule: {error}") from error
    except PlanError as error:
        raise JobError(f"no plan: {error}") from error
    except ValueError as error:
        raise JobError(f"pipeline.{error}") from error


def _choose_redundancy(spec: Spec, profile: Profile) -> ChosenPlan:
    """The fastest plan whose redundancy keeps what `elastic.undone_steps` promises; of equally fast ones that which
    undoes the fewest steps.

    Raises:
        JobError: none can be had.
    """
    allowed = spec.elastic.undone_steps
    found: list[tuple[float, int, str, ChosenPlan]] = []
    why: JobError | None = None

    def look(undoes: int, words: str, **elastic: Any) -> ChosenPlan | None:
        nonlocal why
        tried = spec.model_copy(update={"elastic": spec.elastic.model_copy(update=elastic)})
        try:
            choice = _chosen(tried, profile)
        except JobError as error:
            why = why or error
            return None
        undoes = max(undoes, choice.prediction.redundancy.undone_steps)
        if choice.plan.world_size == 1 and elastic["redundancy"] == "peer":
            why = why or JobError(
                f"elastic.undone_steps = {allowed} needs copies on another rank, and the fastest plan has 1 rank: give"
                " pipeline.ranks, or allow as many undone steps as checkpoint.every_steps costs"
            )
        elif undoes <= allowed:
            found.append((choice.prediction.step_s, undoes, words, choice))
        return choice

    look(0, "gradients to copies in each step", redundancy="peer", copy_every=1)
    every = allowed + 1
    while every > 1:
        choice = look(0, f"a snapshot every {every} steps", redundancy="peer", copy_every=every)
        if choice is None or choice.prediction.redundancy.undone_steps <= allowed:
            break
        every -= max(1, choice.prediction.redundancy.undone_steps - allowed)
    written = spec.checkpoint.every_steps
    if written and (undoes := undone_steps(written, written)) <= allowed:
        look(undoes, "checkpoints alone", redundancy="checkpoint")
    if not found:
        assert why is not None
        raise why
    _, undoes, words, choice = min(found, key=lambda each: each[:2])
    others = ", ".join(f"{other} {seconds(step_s)}" for step_s, _, other, _ in found if other != words)
    kept = f"redundancy: {words}, so that a lost rank undoes {counted(undoes, 'committed step')} at most"
    instead = f" (instead: {others})" if others else ""
    reason = f"{_reason(choice, profile)}; {kept}{instead}"
    return replace(choice, plan=replace(choice.plan, reason=reason))


def price_of_copies(spec: Spec, choice: ChosenPlan) -> tuple[CopiesCost, ...]:
    """Costs of no copy, snapshots, one copy and each further one of every layer for the plan of `choice`; none if the
    settled `spec` keeps no copies. Where the profile has too few machines for them, each rank counts as on one of its
    own."""
    plan, profile = choice.plan, choice.prediction.profile
    costs: list[CopiesCost] = []
    for copies in range(min(max(COMPARED, spec.elastic.copies), plan.world_size - 1) + 1):
        domains = _domains(spec, profile, copies)
        if domains is None or plan.world_size == 1:
            return ()
        if copies == 1:
            costs += costs_of_snapshots(profile, plan, choice.schedule, domains, copies)
        costs.append(cost_of_copies(profile, plan, choice.schedule, domains, copies))
    return tuple(costs)


def freezing(spec: Spec, choice: ChosenPlan) -> Freezing:
    """Predict TimelyFreeze on the steps of `choice`. Other methods cannot be predicted, so nothing is frozen.

    Raises:
        JobError: there is nothing to freeze.
    """
    plan, schedule, base = choice.plan, choice.schedule, choice.prediction
    _, lower = bounds(base.profile, plan, schedule)
    if not spec.freeze.timely:
        makespan_s = base.simulation.makespan_s
        actions = [action for program in schedule.programs for action in program if action.kind in FREEZABLE]
        return Freezing(
            prediction=base,
            r_max=0.0,
            unfrozen_s=makespan_s,
            solved_s=makespan_s,
            all_frozen_s=simulate(schedule, lower).makespan_s,
            ratios=tuple((action.stage, action.index, 0.0) for action in actions),
            mean_per_stage=(0.0,) * schedule.stages,
            duals=(0.0,) * schedule.stages,
        )
    try:
        r_max, least, adaptive = spec.freeze.r_max, spec.freeze.least_update, spec.optimizer.adaptive
        solution, ratios = profiled(base.profile, plan, schedule, r_max, least, adaptive=adaptive)
    except ValueError as error:
        raise JobError(f'{error}; or set freeze.method = "none"') from error
    frozen = predict(base.profile, plan, schedule, ratios)
    return Freezing(
        prediction=frozen,
        r_max=max(solution.mean_per_stage) if r_max == AUTO else r_max,
        unfrozen_s=solution.unfrozen_s,
        solved_s=solution.solved_s,
        all_frozen_s=solution.all_frozen_s,
        ratios=solution.ratios,
        mean_per_stage=solution.mean_per_stage,
        duals=solution.duals,
    )


def check_profile(spec: Spec, profile: Profile) -> None:
    """Raises:
    JobError: `profile` was made with other settings than this job's, or there is nothing to freeze in its model.
    """
    for name, measured in _made_with(profile).items():
        asked = _setting(spec, name, profile)
        if asked != measured:
            raise JobError(
                f"the profile was made with {name} = {json.dumps(measured)} ({profile.source}), and the job has"
                f" {name} = {json.dumps(asked)}: profile this job with freshet profile, or set"
                f" {name} = {json.dumps(measured)}"
            )
    if spec.freeze.timely and not any(layer.weight_grad_s for layer in profile.model.layers):
        raise JobError(
            f"freeze.method = {spec.freeze.method!r}, but the model has no weight gradients to skip"
            f' ({profile.source}): set freeze.method = "none"'
        )


def _made_with(profile: Profile) -> dict[str, Any]:
    """The settings that a job must share with `profile`: `section.key` of its spec -> value."""
    model = profile.model
    settings = {"pipeline.microbatch_size": model.microbatch_size, "job.precision": model.precision}
    if any(device.kind == "cpu" for device in profile.cluster.devices):
        settings["job.threads"] = model.threads
    return {**settings, "job.compile": False, "model.fixed": None, "model.lora": None, **model.settings}


def _setting(spec: Spec, name: str, profile: Profile) -> Any:
    """The value of `section.key` in `spec`, as JSON has it.

    Raises:
        JobError: there is no such key; `profile` named it.
    """
    value: Any = spec.model_dump(mode="json")
    value["model"] = {**dict.fromkeys(KEYS), **value["model"]}
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            raise JobError(
                f"the profile was made with {name} ({profile.source}), and a spec has no such key: take it out of the"
                " profile's model.settings, or profile this job with freshet profile"
            )
        value = value[key]
    return value


def as_planned(profile: Profile, spec: Spec) -> Profile:
    """`profile` with the spec's use of memory: the limit per rank, where standbys are kept, the copies that freezing
    keeps of each layer (APF three times its weights, AutoFreeze once), and those for curvature samples (weights and
    gradients)."""
    limit = spec.cluster.memory_per_rank_bytes
    sampled = 2 if spec.job.curvature_every else 0
    profile = profile.frozen_by(spec.freeze.method)
    layers = tuple(
        # Gradients are as large as the weights that have them.
        replace(layer, sample_bytes=sampled * layer.gradient_bytes)
        for layer in profile.model.layers
    )
    devices = profile.cluster.devices
    if limit is not None:
        devices = tuple(replace(device, memory_bytes=limit) for device in devices)
    return replace(
        profile,
        model=replace(profile.model, layers=layers),
        cluster=replace(profile.cluster, devices=devices, refresh_every=_refresh_every(spec, profile)),
    )


def as_followed(profile: Profile, spec: Spec, freeze: FreezeRecord) -> Profile:
    """`as_planned` with the layers that are frozen as a whole by now, as the log has them."""
    layers = freeze.prefix.layers if freeze.prefix is not None else 0
    return as_planned(profile, spec).with_prefix(layers, layers if spec.freeze.lasts else 0)


def _refresh_every(spec: Spec, profile: Profile) -> int:
    on_host = any(spec.elastic.copies_on_host(device.kind) for device in profile.cluster.devices)
    return spec.elastic.refresh_every if on_host else 0


def _for_one_pipeline(profile: Profile, ranks: int | None, pipeline: PipelineConfig) -> Profile:
    """`profile` with the devices that one pipeline may use.

    Raises:
        JobError: there are too few devices.
    """
    cluster = profile.cluster
    there, count = len(cluster.devices), pipeline.pipeline_count
    most = there // count if ranks is None else ranks
    if not 1 <= most <= there:
        raise JobError(
            f"the profile has {counted(there, 'device')} ({profile.source}), and pipeline.ranks ="
            f" {AUTO if ranks is None else ranks * count} in {counted(count, 'pipeline')} needs {ranks or count}:"
            " profile with as many ranks, or lower pipeline.ranks"
        )
    # The links of all pipelines stay: gradients travel between them.
    return replace(profile, cluster=replace(cluster, devices=cluster.devices[:most]))


def _domains(spec: Spec, profile: Profile, copies: int) -> tuple[str, ...] | None:
    """Per place, the machine that it was profiled on; None for a job without standbys. If a profile has fewer ranks
    than the job, its machines repeat. If it has too few machines for `copies` copies, each place counts as one: a job
    starts on no fewer."""
    if spec.elastic.redundancy not in (None, "peer", AUTO):
        return None
    machines = [device.machine for device in profile.cluster.devices]
    places = max(len(machines), 0 if spec.pipeline.ranks == AUTO else spec.pipeline.ranks)
    if lacking(machines, copies) is not None:
        return tuple(f"machine {place}" for place in range(places))
    return tuple(machines[place % len(machines)] for place in range(places))


def places_of(spec: Spec, profile: Profile, places: int) -> tuple[str, ...]:
    """The failure domains of so many places, as the first plan has them."""
    known = _domains(spec, profile, spec.elastic.copies) or ("",)
    return tuple(known[place % len(known)] for place in range(places))


def _reason(choice: ChosenPlan, profile: Profile) -> str:
    """The reason for this plan, in words for people."""
    layers, prediction = len(profile.model.layers), choice.prediction
    agreeing = [name for name, pick in choice.programs.items() if pick.layers == choice.plan.layers]
    how = f"by {choice.plan.partition}"
    if choice.plan.partition == "explicit":
        how = "as the spec asks"
    elif agreeing and choice.plan.partition not in agreeing:
        how += f", which takes the cut of {' and '.join(agreeing)}"
    # A search by one program may take a cut near that program's own: then it is the name of what was taken.
    others = {
        name: pick.predicted_step_s
        for name, pick in choice.programs.items()
        if pick.predicted_step_s is not None
        and pick.layers != choice.plan.layers
        and name != choice.plan.partition
    }
    instead = ", ".join(f"{name} {seconds(step_s)}" for name, step_s in others.items())
    return (
        f"first plan: {counted(layers, 'layer')} cut {how}; a step is predicted to take {seconds(prediction.step_s)},"
        f" {percent(prediction.bubble)} of it bubble" + (f" (instead: {instead})" if instead else "")
    )


def replanner_of(settled: Settled) -> Replanner:
    """The planner of a job that has begun."""
    spec, profile = settled.spec, settled.profile
    frozen = lasting_prefix(spec.freeze)
    return Replanner(
        first=settled.plan,
        schedule=settled.schedule,
        parameters=settled.outline.parameters,
        copies=spec.elastic.peer_copies,
        copy_every=spec.elastic.copy_every,
        profile=None if profile is None else as_planned(profile, spec),
        divisible=not settled.outline.buffers and spec.freeze.batch == "keep",
        frozen=frozen,
        first_frozen=frozen,
        released=settled.plan.frozen,
        frozen_cost=spec.freeze.frozen_cost if spec.freeze.pack == "paper" else None,
    )
