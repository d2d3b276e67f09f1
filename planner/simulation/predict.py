"""Profile + plan + schedule -> the predicted step: time, bubble, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean

from planner.final_gradients import final_gradients
from planner.freezing import Ratios
from planner.ir import ActionKind, Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.expand import schedule_of_pipeline
from planner.schedule.passes import repeat
from planner.shares import check_shares, numbers_of
from planner.simulation.costs import action_costs, check_fit, memory_limits, outside_s, rank_slowdowns
from planner.simulation.gradient_communication import (
    exchanged_s,
    shipped_bytes,
    shipped_s,
    standby_update_s,
)
from planner.simulation.memory import Memory, OverTime, memory, memory_over_time
from planner.simulation.simulate import Simulation, simulate
from planner.simulation.snapshot_cost import cost_of_snapshots
from planner.simulation.standby_memory import standby_bytes, standby_host_bytes


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """The cost of a plan's standbys, or of its snapshots."""

    bytes_per_step: int
    """Bytes that all owners send to standbys; of states for snapshots on average."""
    seconds_per_step: float
    """Time added to a step: gradients on their way, and updates for which no rank has idle time. With snapshots, the
    average cost of copying and sending them."""
    memory_bytes: int
    """Weights, optimizer state and gradients of copies, on the rank that keeps most."""
    on_host: bool = False
    """Whether that is memory of its host, not of its device; so it is with snapshots."""
    undone_steps: int = 0
    """The most committed steps that a lost rank undoes."""


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """One pipeline's step before the exchange."""

    pipeline: int | None
    """None: all pipelines run alike."""
    window: Simulation
    """One window; with uneven shares, the pipeline's whole share."""
    whole: Simulation
    """All its windows in a row."""
    ratios: Ratios | None
    """`ratios[layer][microbatch]` of the window's microbatches."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training step as predicted. Memory is computed on first use."""

    profile: Profile
    plan: Plan
    ratios: Ratios | None
    runs: tuple[PipelineRun, ...]
    """One for all pipelines; with uneven shares, one for each."""
    step_s: float
    """The windows, the gradient exchange between replicas, the gradients for standbys, the update, the commit."""
    redundancy: Redundancy
    """The part of `step_s` and of the memory that standbys cause."""

    @property
    def slowest(self) -> PipelineRun:
        """The pipeline that ends last; the first of several."""
        return max(self.runs, key=lambda run: run.whole.makespan_s)

    @property
    def simulation(self) -> Simulation:
        """Simulation of one window of the slowest pipeline. Each executes `plan.windows` windows in a row; with uneven
        shares, one."""
        return self.slowest.window

    @property
    def windows_s(self) -> float:
        """All windows of a step; with one window, its makespan."""
        return self.slowest.whole.makespan_s

    @property
    def bubble(self) -> float:
        """Mean over the ranks of the share of the makespan in which a rank does not compute."""
        return fmean(self.simulation.bubble)

    @cached_property
    def memory(self) -> Memory:
        """Per pipeline rank, the memory of the place that needs most."""
        of_runs = [
            memory(self.profile, self.plan, run.window, run.ratios, pipeline=run.pipeline).ranks
            for run in self.runs
        ]
        return Memory(
            tuple(max(ranks, key=lambda rank: rank.peak_bytes) for ranks in zip(*of_runs, strict=True))
        )

    def memory_over_time(self) -> tuple[OverTime, ...]:
        """Per rank, the parts of its memory over the window of `simulation`; computed at each call."""
        run = self.slowest
        return memory_over_time(self.profile, self.plan, run.window, run.ratios, pipeline=run.pipeline)

    @property
    def peak_memory_bytes(self) -> int:
        """Highest peak of any rank."""
        return max(self.memory.peak_bytes)

    @property
    def excess_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes by which its peak exceeds its device's memory; 0 where it fits."""
        limits = memory_limits(self.profile.cluster, self.plan.pipeline_ranks, self.plan.pipeline_count)
        return tuple(max(0, peak - limits[rank]) for rank, peak in enumerate(self.memory.peak_bytes))

    @property
    def fits(self) -> bool:
        return not any(self.excess_bytes)


def predict(profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None = None) -> Prediction:
    """Simulate one step of `plan`.

    Args:
        schedule: the plan's schedule for one replica, with an R on each stage that recomputes.
        ratios: `ratios[layer][microbatch of a replica]`, the frozen share of weight-gradient time; None freezes
            nothing.

    Raises:
        ValueError: the arguments do not fit together.
        ScheduleError: the schedule's family has none for the plan's shares.
    """
    return _predicted(profile, plan, ratios, tuple(_runs(profile, plan, schedule, ratios)))


def with_copies_of(bare: Prediction, plan: Plan) -> Prediction:
    """The prediction of `plan`, which is that of `bare` with other copies: no window changes. Copies never make a step
    shorter than one without any."""
    return _predicted(bare.profile, plan, bare.ratios, bare.runs)


def _predicted(
    profile: Profile, plan: Plan, ratios: Ratios | None, runs: tuple[PipelineRun, ...]
) -> Prediction:
    exchange_s = exchanged_s(profile, plan)
    # The exchange waits for the last of a rank's siblings.
    ends_s = [max(of_rank) for of_rank in zip(*(_ends_s(run.whole) for run in runs), strict=True)]
    ready_s = [end_s + more_s for end_s, more_s in zip(ends_s, exchange_s, strict=True)]
    step_s = alone_s = max(ready_s) + outside_s(profile, plan)
    if plan.standbys:
        early_s = early_gradients_s(profile, plan, runs[0].whole, ratios)
        shipped = max(shipped_s(profile, plan, ready_s * plan.pipeline_count, early_s))
        step_s = shipped + outside_s(profile, plan) + _beyond_idle_s(profile, plan, runs)
    on_host = profile.cluster.refresh_every > 0
    redundancy = Redundancy(
        bytes_per_step=shipped_bytes(profile, plan),
        seconds_per_step=step_s - alone_s,
        memory_bytes=max((standby_host_bytes if on_host else standby_bytes)(profile, plan)),
        on_host=on_host,
    )
    if plan.snapshots:
        kept = cost_of_snapshots(profile, plan, step_s)
        step_s += kept.seconds_per_step
        redundancy = Redundancy(
            bytes_per_step=redundancy.bytes_per_step + kept.bytes_per_step,
            seconds_per_step=step_s - alone_s,
            memory_bytes=redundancy.memory_bytes + kept.memory_bytes,
            on_host=True,
            undone_steps=kept.undone_steps,
        )
    return Prediction(
        profile=profile,
        plan=plan,
        ratios=ratios,
        runs=runs,
        step_s=step_s,
        redundancy=redundancy,
    )


def _runs(profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None) -> Iterator[PipelineRun]:
    if not plan.shares:
        window = simulate(schedule, action_costs(profile, plan, schedule, ratios))
        whole = window if plan.windows == 1 else _all_windows(profile, plan, schedule, ratios)
        yield PipelineRun(pipeline=None, window=window, whole=whole, ratios=ratios)
        return
    check_fit(profile, plan, schedule.stages, ratios, schedule.microbatches)
    check_shares(plan)
    for pipeline in range(plan.pipeline_count):
        own = schedule_of_pipeline(plan, schedule, pipeline)
        numbers = numbers_of(plan, pipeline)
        its = (
            None
            if ratios is None
            else tuple(tuple(row[g % plan.microbatches] for g in numbers) for row in ratios)
        )
        run = simulate(own, action_costs(profile, plan, own, its, pipeline=pipeline))
        yield PipelineRun(pipeline=pipeline, window=run, whole=run, ratios=its)


def _all_windows(profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None) -> Simulation:
    repeated = repeat(schedule, plan.windows)
    again = None if ratios is None else tuple(tuple(row) * plan.windows for row in ratios)
    return simulate(repeated, action_costs(profile, plan, repeated, again))


def _beyond_idle_s(profile: Profile, plan: Plan, runs: Sequence[PipelineRun]) -> float:
    """Seconds by which updates of standbys, which run beside the window, exceed a rank's idle time; the largest."""
    longest_s = max(run.whole.makespan_s for run in runs)
    idle_s = [longest_s - busy_s for run in runs for busy_s in run.whole.busy_s]
    if len(runs) == 1:
        idle_s *= plan.pipeline_count
    return max(
        max(0.0, update_s - free_s)
        for update_s, free_s in zip(standby_update_s(profile, plan), idle_s, strict=True)
    )


def _ends_s(simulation: Simulation) -> list[float]:
    """Per rank, the end of its last action."""
    lengths = accumulate(len(program) for program in simulation.schedule.programs)
    return [simulation.end_s[length - 1] for length in lengths]


def early_gradients_s(
    profile: Profile, plan: Plan, window: Simulation, ratios: Ratios | None
) -> dict[int, float]:
    """Layer -> when its gradients may leave, of those that need not wait for the window's end.

    None need not where gradients are summed up further after the window (replicas and tied parameters:
    `workers.step.generation.make_sink`), nor where statistics of freezing go with them or the loss is scaled
    (`workers.step.training.TrainingLoop`).
    """
    layers = profile.model.layers
    if plan.replicas > 1 or ratios is not None or profile.model.precision == "float16":
        return {}
    if any(layer.tied_from is not None or layer.statistics_bytes for layer in layers):
        return {}
    schedule = window.schedule
    slowdowns = rank_slowdowns(profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
    firsts = [0, *accumulate(len(program) for program in schedule.programs)]
    early: dict[int, float] = {}
    for rank, program in enumerate(schedule.programs):
        final = final_gradients(
            program,
            rank=rank,
            stages=schedule.stages,
            frozen_stages=schedule.frozen_stages,
            rank_of_stage=schedule.rank_of_stage,
        )
        for number, stages in final.before.items():
            for stage in stages:
                for layer in range(*plan.layers[stage]):
                    early[layer] = window.start_s[firsts[rank] + number]
        for number in final.during:
            action = program[number]
            left_s = window.end_s[firsts[rank] + number]
            for layer in range(*plan.layers[action.stage]):
                early[layer] = left_s
                one = layers[layer]
                taken_s = one.backward_s if action.kind is ActionKind.BACKWARD else one.weight_grad_s
                left_s -= slowdowns[rank] * taken_s
    return early
