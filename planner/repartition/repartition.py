"""The best plan for the ranks that train, at the speeds that are known or predicted of them: the entry of this room.

DynPipe's Algorithm 2: the model is condensed, cuts and orders of the ranks are searched, a simulator judges each with
the slowdowns of its own stages, and the best are refined layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.freeze.decision import profiled_ratios
from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.repartition.boundaries import blocks_of, rank_bytes
from planner.repartition.condensation import Blocks
from planner.repartition.judge import Judge
from planner.repartition.pool import Judged
from planner.repartition.problem import Order, RepartitionProblem
from planner.repartition.search import ALIKE, QUICK, RepartitionEffort, Search
from planner.repartition.slowdowns import Known, SlowdownModel
from planner.schedule.expand import schedule_after, without_recompute
from planner.search.balanced_shares import balanced_shares
from planner.search.replan import Replanner
from planner.simulation.costs import memory_limits
from planner.simulation.memory import most_bytes
from planner.simulation.predict import Prediction, predict
from planner.wording import counted

MOST_SOLVING_S = 1.0
"""Time limit of all solves of one search."""
MOST_PROGRAMS = 16
"""Most programs that are solved."""
PROGRAM_S = 0.15
PROGRAM_ACTIONS = 2_000
"""A program of so many actions takes so long, and another one in proportion to the square of its actions."""

PARTITION = "dynpipe"
"""The `partition` of the plans found here."""
FINALIST_ACTIONS = 10_000
"""Actions that the exact predictions of plans may have together, beyond the first prediction of each order."""
MOST_FINALISTS = 6
TIGHTENINGS = 6
"""Most reruns of a search with tighter memory limits."""


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The result of a search."""

    now: Prediction
    """Prediction of the present plan."""
    choices: tuple[Prediction, ...]
    """Predictions of plans that fit the memory, with their standbys: the fastest first, or one about as fast that moves
    less. A later one may be worth its move where the first one's costs too much: it keeps the order of the ranks."""
    blocks: int
    """Blocks of the condensed model."""
    bounded: int
    """Candidates whose bound was computed."""
    simulated: int
    predicted: int
    """Loads whose slowdown was predicted."""
    own_ratios: bool = False
    """Whether each plan counts with the freeze ratios that it would get."""

    @property
    def best(self) -> Prediction:
        return self.choices[0]

    @property
    def effort(self) -> str:
        """Extent of the search, in words."""
        return f"{counted(self.blocks, 'block')}, {self.bounded:,} candidates, {self.simulated:,} of them simulated"


def best(
    replanner: Replanner,
    now: Plan,
    domains: Sequence[str],
    slowdowns: Sequence[float | None] | SlowdownModel | None = None,
    *,
    ratios: Ratios | None = None,
    r_max: float | None = None,
    reorder: bool = True,
    share: bool = False,
    blocks: Blocks | None = None,
    effort: RepartitionEffort = QUICK,
) -> FoundPlan:
    """Search the fastest plan for the places of `now`: other layers per stage, other ranks for the stages, and other
    shares of a step for the pipelines.

    Args:
        now: the plan that the ranks follow.
        domains: failure domain by place.
        slowdowns: by place, or what predicts them for the layers of a candidate; None, for a place or for all: as the
            median of the profile's devices.
        ratios: frozen shares of weight gradients, `ratios[layer][microbatch]`, that are in force; None: nothing is.
        r_max: largest mean freeze ratio of a stage, if the freeze program is solved again for the plan that is taken:
            then each plan counts with the solution for it. Where that would take too long, and with None, all plans
            count with `ratios`.
        reorder: whether ranks may exchange their parts of the schedule.
        share: whether pipelines may have uneven shares, if the job's replicas can be divided: with the best cut, or
            with the present one, which moves no layer.
        blocks: the condensed model; None: as `condensation.py` condenses it.

    Raises:
        PlanError: no plan that was found fits the memory.
        ValueError: the job has no profile.
    """
    if replanner.profile is None:
        raise ValueError("without a profile no step can be predicted")
    predicts = callable(slowdowns)
    profile = replanner.profile_on(domains, None if predicts else slowdowns)
    devices = profile.cluster.devices[: now.world_size]
    known = slowdowns if predicts else Known(tuple(device.slowdown for device in devices))
    schedule = without_recompute(schedule_after(replanner.schedule, replace(now, frozen=0)))
    programs = 0 if r_max is None else affordable_programs(schedule)
    # Of the present plan and another one, or neither would compare with the other.
    own = r_max if programs > 1 else None
    problem = RepartitionProblem(profile, now, schedule, known, ratios if own is None else evenly(now, own))
    judge = Judge(problem)
    blocks = blocks_of(problem) if blocks is None else blocks
    finals = _Finals(replanner, problem, domains)
    reserved: dict[int, int] | None = None
    refusal = "no cut was found that fits the memory"
    for _ in range(TIGHTENINGS):
        judged = Search(problem, judge, blocks, effort, reserved).run(reorder=reorder)
        if not judged:
            break
        choices = finals.choices(judged)
        if choices and share and replanner.divisible and now.pipeline_count > 1:
            choices = finals.with_shares(choices)
        if choices:
            present = finals.predicted(now)
            if own is not None:
                present = finals.with_own_ratios(present, own, ratios)
                choices = finals.all_with_own_ratios(choices, own, ratios, programs - 1)
                if not choices:
                    break
            return FoundPlan(
                now=present,
                choices=choices,
                blocks=len(blocks),
                bounded=judge.bounded,
                simulated=judge.simulated,
                predicted=problem.slowdowns.predicted,
                own_ratios=own is not None,
            )
        reserved = finals.unseen_bytes(judged[0], reserved or {})
        refusal = finals.refusal(judged[0])
    raise PlanError(refusal)


class _Finals:
    """The exact predictions at the end of a search."""

    def __init__(self, replanner: Replanner, problem: RepartitionProblem, domains: Sequence[str]) -> None:
        self._replanner, self._problem, self._domains = replanner, problem, domains

    def choices(self, judged: Sequence[Judged]) -> tuple[Prediction, ...]:
        """The predictions of the best candidates that fit the memory, the best first."""
        problem = self._problem
        actions = sum(map(len, problem.window.programs))
        most = min(MOST_FINALISTS, max(1, FINALIST_ACTIONS // actions))
        fitting: list[tuple[Prediction, int]] = []
        orders = (judged[0].order, problem.order_now)
        every = len(judged) * actions <= FINALIST_ACTIONS
        if every:
            most, orders = len(judged), tuple(one.order for one in judged)
        for order in dict.fromkeys(orders):
            own = [one for one in judged if one.order == order]
            for one in self._ranked(own)[:most]:
                prediction = self._prediction(one)
                # The bound pays where there are many plans of few actions.
                if self._fits(prediction) if every else prediction.fits:
                    fitting.append((prediction, int(problem.moved_bytes(one.cut[None, :], order)[0])))
        return _fastest_first(fitting)

    def with_shares(self, choices: Sequence[Prediction]) -> tuple[Prediction, ...]:
        """`choices`, with the first one and the present cut also with the shares that are best for them."""
        problem = self._problem
        shared: list[Prediction] = []
        for plan in (problem.now, choices[0].plan):
            even = replace(plan, shares=())
            profile = self.predicted(even).profile
            found = balanced_shares(profile, even, problem.schedule_of(even), problem.ratios)
            if found.fits and found.plan.shares:
                shared.append(found)
        return _fastest_first([(each, self._moved_bytes(each.plan)) for each in (*shared, *choices)])

    def all_with_own_ratios(
        self, choices: Sequence[Prediction], r_max: float, ratios: Ratios | None, most: int
    ) -> tuple[Prediction, ...]:
        """The first `most` of the choices, with one among them that keeps the order of the ranks, if there is one."""
        chosen = list(range(min(most, len(choices))))
        kept = [n for n, each in enumerate(choices) if each.plan.stage_ranks == self._problem.now.stage_ranks]
        if len(chosen) > 1 and kept and kept[0] not in chosen:
            chosen[-1] = kept[0]
        found = [self.with_own_ratios(choices[number], r_max, ratios) for number in chosen]
        return _fastest_first([(each, self._moved_bytes(each.plan)) for each in found if each.fits])

    def with_own_ratios(self, choice: Prediction, r_max: float, ratios: Ratios | None) -> Prediction:
        """The prediction with the solution of the freeze program for its plan; with `ratios` if there is none."""
        plan, profile = choice.plan, choice.profile
        schedule = self._problem.schedule_of(plan)
        return predict(profile, plan, schedule, own_ratios(profile, plan, schedule, r_max) or ratios)

    def _moved_bytes(self, plan: Plan) -> int:
        problem = self._problem
        cut = np.array([[0, *(stop for _, stop in plan.layers)]])
        return int(problem.moved_bytes(cut, self._order_of(plan))[0])

    def _order_of(self, plan: Plan) -> Order:
        places = dict(zip(self._problem.stage_ranks, plan.stage_ranks, strict=True))
        return tuple(places[rank] for rank in range(self._problem.ranks))

    def unseen_bytes(self, one: Judged, before: Mapping[int, int]) -> dict[int, int]:
        """By pipeline rank, the memory that a candidate takes beyond what partition programs see of it: as much is
        reserved from now on, and at least as much as `before`, so that the candidate is not found again."""
        problem = self._problem
        costs = problem.costs(one.cut, one.order, reserved_bytes={})
        seen = rank_bytes(costs, one.cut[None, :])[0]
        prediction = self._prediction(one)
        reserved: dict[int, int] = {}
        for part, rank in enumerate(one.order):
            unseen = prediction.memory.peak_bytes[rank] - int(seen[part])
            known = before.get(rank, unseen)
            reserved[rank] = max(known, unseen) if prediction.excess_bytes[rank] else known
        return reserved

    def refusal(self, one: Judged) -> str:
        """Why a candidate cannot be."""
        lacking = self._prediction(one).excess_bytes
        most = max(lacking)
        return (
            f"no cut was found that fits the memory: with the fastest one, place {lacking.index(most)} lacks"
            f" {counted(most, 'byte')}"
        )

    def _prediction(self, one: Judged) -> Prediction:
        plan = self._problem.plan(one.cut, one.order, PARTITION)
        return self.predicted(self._replanner.with_standbys(plan, self._domains))

    def _fits(self, prediction: Prediction) -> bool:
        """Whether a plan with even shares fits the memory: less work than to simulate what it takes, where there is
        plenty."""
        plan, profile, problem = prediction.plan, prediction.profile, self._problem
        limits = memory_limits(profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
        most = most_bytes(profile, plan, problem.schedule_of(plan), problem.in_flight)
        return all(taken <= limit for taken, limit in zip(most, limits, strict=True)) or prediction.fits

    def predicted(self, plan: Plan) -> Prediction:
        """The prediction of a plan at the slowdowns of its own stages."""
        problem = self._problem
        cut = np.array([0, *(stop for _, stop in plan.layers)])
        slow = problem.slowdowns_of(cut, self._order_of(plan))
        cluster = problem.profile.cluster
        devices = tuple(
            replace(device, slowdown=factor) for device, factor in zip(cluster.devices, slow, strict=False)
        )
        profile = replace(problem.profile, cluster=replace(cluster, devices=devices))
        return predict(profile, plan, problem.schedule_of(plan), problem.ratios)

    def _ranked(self, judged: Sequence[Judged]) -> list[Judged]:
        """The fastest first; of those that are about as fast as the fastest, the one that moves least."""
        fastest_s = judged[0].step_s
        near = [one for one in judged if one.step_s <= fastest_s * (1 + ALIKE)]
        moved = self._problem.moved_bytes(np.array([one.cut for one in near]), near[0].order)
        least = near[int(moved.argmin())]
        return [least, *(one for one in judged if one is not least)]


def _fastest_first(each_moves: Sequence[tuple[Prediction, int]]) -> tuple[Prediction, ...]:
    """Predictions with the bytes that each plan moves: those about as fast as the fastest come first, by bytes."""
    fastest_s = min((prediction.step_s for prediction, _ in each_moves), default=0.0)

    def moved_if_alike(each: tuple[Prediction, int]) -> tuple[float, float]:
        prediction, moved = each
        alike = prediction.step_s <= fastest_s * (1 + ALIKE)
        return moved if alike else float("inf"), prediction.step_s

    return tuple(prediction for prediction, _ in sorted(each_moves, key=moved_if_alike))


def affordable_programs(schedule: Schedule) -> int:
    """Number of programs of a schedule that there is time to solve. Derived from their size, so that the same question
    always has the same answer."""
    actions = sum(map(len, schedule.programs))
    return min(MOST_PROGRAMS, int(MOST_SOLVING_S / (PROGRAM_S * (actions / PROGRAM_ACTIONS) ** 2)))


def evenly(plan: Plan, r_max: float) -> Ratios:
    """Ratios that every plan's program allows: none of its solutions makes a longer window than these."""
    return ((r_max,) * plan.microbatches,) * plan.layers[-1][1]


def own_ratios(profile: Profile, plan: Plan, schedule: Schedule, r_max: float) -> Ratios | None:
    """Solve the freeze program for `plan`; None: freezing saves nothing with it, so that what is frozen stays.

    The ratios in force are the solution for another cut: with them a plan may look slower, or faster, than it will be.
    """
    try:
        return profiled_ratios(profile, plan, schedule, r_max)
    except ValueError:
        return None
