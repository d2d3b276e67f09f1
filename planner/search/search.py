"""The plan to run: programs propose cuts, the simulator ranks them, memory limits exclude some.

`choose` decides what a wish leaves open. It knows no device and no file, only a profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.ir import Schedule
from planner.partition import explicit
from planner.partition.refine import refine
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.search import end_to_end
from planner.search.alternatives import Alternative
from planner.search.candidate import Candidate
from planner.search.convergence import Convergence
from planner.search.end_to_end import EndToEnd
from planner.search.evaluate import LEAST_MEMORY, PROGRAMS, Evaluator
from planner.search.shapes import shape_of, shapes
from planner.simulation.predict import Prediction
from planner.wording import counted

END_TO_END = "dynpipe"
"""The partition that takes the best simulated cut."""
_RESTARTS = 24
"""Random cuts near the best from which the refinement starts again."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The budget of a search."""

    finalists: int
    """Shapes with a full search of their cuts; one cut ranks each of the others."""
    actions: int
    """Most actions that the refinement of a shape simulates."""
    ranking_actions: float = float("inf")
    """Actions that the cuts that rank shapes may have together, before no further shape is cut: those whose lower bound
    is least come first."""


THOROUGH = Effort(finalists=3, actions=200_000)
"""Seconds of work, before a job begins."""
QUICK = Effort(finalists=1, actions=5_000, ranking_actions=40_000)
"""Tens of milliseconds, while ranks wait; up to a second for a thousand layers on 64 ranks."""


@dataclass(frozen=True, kw_only=True)
class PlanWish:
    """The request. None: to be searched."""

    ranks: int | None
    """Ranks of one pipeline; searched up to the devices of the profile."""
    schedule: str | Schedule | None
    """A family of the registry, or a schedule of the user's own (which says ranks and microbatches itself)."""
    microbatches: int | None
    """Per replica and step, of the profile's microbatch size. The search maximizes samples per second, which always
    favours larger batches, so it stops at 4 per rank, beyond which GPipe's bubble is small (Huang et al. 2019)."""
    partition: str | tuple[int, ...] = END_TO_END
    """`dynpipe`: the best simulated cut among the picks of all programs and the cuts near them. `parameter`, `memory`,
    `time`, `bottleneck`: that program's own pick. Numbers: the layers per stage."""
    chunks: int | None = None
    """Stages per rank; None: the family's default."""
    replicas: int = 1
    pipelines: int | None = None
    """Value of `Plan.pipelines`."""
    shard: str = "none"
    """Value of `Plan.shard`."""
    recompute: tuple[int, ...] = ()
    """Layers that recompute."""
    frozen: int = 0
    """Value of `Plan.frozen`."""
    domains: tuple[str, ...] | None = None
    """Failure domains of as many places as a plan can have; they determine where copies are. None: no copies."""
    copies: int = 1
    """Copies that each layer has beside itself."""
    copy_every: int = 1
    """1: they are standbys; more: snapshots, one every so many steps."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """The chosen plan and its alternatives."""

    plan: Plan
    schedule: Schedule
    """With its recomputes."""
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    """The chosen plan among them."""
    programs: Mapping[str, Alternative]
    """Each program's own cut for the chosen ranks, schedule and microbatches."""

    def end_to_end(
        self, convergence: Convergence | None = None, *, synchronous: bool | None = None
    ) -> EndToEnd:
        """The pipeline of DynPipe's Algorithm 1, with several devices per stage, on all devices of the profile.

        It is for information only: the engine has one device per stage and does not run asynchronous schedules yet.

        Args:
            convergence: for T(S) of an asynchronous schedule; without it T is constant, as it is for a synchronous
                one, and 1.
            synchronous: whether the pipeline drains before an update; None: as in the schedule. An update has as many
                samples either way.

        Raises:
            PlanError: no pipeline uses all devices, or none fits the memory.
            ConvergenceError: no number of stages reaches the target error.
        """

        together = self.schedule.synchronous if synchronous is None else synchronous

        def updates(stages: int) -> float:
            return 1.0 if convergence is None else convergence.updates(stages, synchronous=together)

        pipelines = end_to_end.plan(
            self.prediction.profile,
            updates,
            microbatches=self.plan.microbatches,
            synchronous=together,
            recompute=self.plan.recompute,
        )
        return min(pipelines, key=lambda pipeline: pipeline.wall_clock_s)


def choose(profile: Profile, wish: PlanWish) -> ChosenPlan:
    """The plan with the most samples per second that fits the memory.

    Each stage has one device, as in the engine; `end_to_end.py` shows what several would give.

    Raises:
        PlanError: no plan meets the request; says by how much, and what would help.
        ScheduleError: no such family.
        ValueError: a list that does not cover the layers once, or no such program.
    """
    partition = wish.partition
    if isinstance(partition, str) and partition not in PROGRAMS:
        raise ValueError(
            f"partition = {partition!r} is no program; there are {', '.join(PROGRAMS)}, or a list"
        )
    evaluators, refused = _evaluators(profile, wish)
    return choose_among(evaluators, partition, refused=refused)


def choose_among(
    evaluators: Sequence[Evaluator],
    partition: str | tuple[int, ...],
    *,
    refused: Sequence[Alternative] = (),
    effort: Effort = THOROUGH,
    compare: bool = True,
) -> ChosenPlan:
    """The best plan of some shapes, by the time per microbatch.

    Args:
        partition: as in `PlanWish`.
        compare: whether to name what else was considered, which takes a whole prediction of each. False: the choice
            has neither alternatives nor the cuts of the programs.
        refused: shapes that cannot be built, for the alternatives of the choice.

    Raises:
        PlanError, ValueError: as `choose`.
    """
    finalists, others, dropped = _finalists(evaluators, partition, effort)
    searches = [_search(evaluator, partition, effort, compare) for evaluator in finalists]

    allowed = [candidate for search in searches for candidate in search.allowed]
    tried = [*allowed, *(pick for search in searches for pick in search.picks.values())]
    best = Candidate.first(allowed)
    if best is None or not best.fits:
        nearest = min(tried, key=Candidate.order)
        raise PlanError(_why_nothing(best or nearest, nearest))

    step_s = best.prediction.step_s
    return ChosenPlan(
        plan=replace(
            best.prediction.plan,
            reason=f"{step_s:.4g} s a step predicted",
            partition=partition if isinstance(partition, str) else "explicit",
            predicted_step_s=step_s,
            predicted_bubble=best.prediction.bubble,
            predicted_peak_memory_bytes=best.prediction.peak_memory_bytes,
        ),
        schedule=best.evaluator.schedule(best.layers),
        prediction=best.prediction,
        alternatives=(
            *(candidate.as_alternative(best, partition) for candidate in dict.fromkeys([*tried, *others])),
            *(failure for search in searches for failure in search.failed.values()),
            *dropped,
            *refused,
        )
        if compare
        else (),
        programs=next(
            search.program_picks(best, partition) for search in searches if search.evaluator is best.evaluator
        )
        if compare
        else {},
    )


@dataclass(frozen=True)
class _Search:
    """The result of searching one shape's cuts."""

    evaluator: Evaluator
    picks: Mapping[str, Candidate]
    """Each program's own cut."""
    failed: Mapping[str, Alternative]
    """The programs that found none within the memory."""
    allowed: tuple[Candidate, ...]
    """The cuts that the request allows."""

    def program_picks(self, best: Candidate, partition: str | tuple[int, ...]) -> dict[str, Alternative]:
        """Each program's own cut, or why it found none."""
        return {
            name: self.picks[name].as_alternative(best, partition)
            if name in self.picks
            else self.failed[name]
            for name in PROGRAMS
        }


def _evaluators(profile: Profile, wish: PlanWish) -> tuple[list[Evaluator], list[Alternative]]:
    """An evaluator per shape that the wish allows, and the shapes that cannot be built.

    Raises:
        PlanError: none can be built.
    """
    devices, layers = len(profile.cluster.devices), len(profile.model.layers)
    if isinstance(wish.schedule, Schedule):
        built, refused = [shape_of(wish.schedule)], []
    else:
        built, refused = shapes(
            layers=layers,
            most_ranks=min(devices, layers),
            ranks=wish.ranks,
            name=wish.schedule,
            chunks=wish.chunks,
            microbatches=wish.microbatches,
        )
    if not built:
        raise PlanError("; ".join(dict.fromkeys(each.why for each in refused)))
    ranks = max(shape.ranks for shape in built)
    if ranks > devices:
        raise PlanError(
            f"pipeline.ranks = {ranks}, and the profile has {counted(devices, 'device')}: use {devices} at most"
        )
    evaluators = [
        Evaluator(
            profile,
            shape,
            replicas=wish.replicas,
            pipelines=wish.pipelines,
            shard=wish.shard,
            recompute=wish.recompute,
            frozen=wish.frozen,
            domains=wish.domains,
            copies=wish.copies,
            copy_every=wish.copy_every,
        )
        for shape in built
    ]
    return evaluators, [Alternative.uncut(each.shape, "", each.why) for each in refused]


def _finalists(
    evaluators: Sequence[Evaluator], partition: str | tuple[int, ...], effort: Effort
) -> tuple[Sequence[Evaluator], list[Candidate], list[Alternative]]:
    """The shapes to search in full; the simulated cuts of other shapes; why the remaining shapes were not cut.

    One cut ranks each shape, in the order of a lower bound. A shape is not cut at all if a bound of it exceeds the time
    of another shape's cut: none of its own could be as fast.
    """
    most, actions = effort.finalists, 0
    if len(evaluators) <= most:
        return evaluators, [], []
    tried: dict[int, Candidate] = {}
    dropped: list[Alternative] = []
    fastest_s = float("inf")
    # Of shapes with the same bound, such as families on the same ranks, those that take least work come first.
    sizes = [evaluator.shape.most_actions for evaluator in evaluators]
    for number in sorted(
        range(len(evaluators)), key=lambda number: (evaluators[number].ideal_s, sizes[number])
    ):
        evaluator = evaluators[number]
        if not evaluator.can_be_within(fastest_s):
            why = "slower per sample than another, whatever its cut"
            if evaluator.ideal_s > fastest_s:
                why = f"at least {evaluator.ideal_s / fastest_s - 1:.1%} slower per sample than another"
            dropped.append(Alternative.uncut(evaluator.shape, "", why))
            continue
        if actions > effort.ranking_actions and fastest_s < float("inf"):
            why = "not tried while ranks wait: no rank more, and no less work for each"
            dropped.append(Alternative.uncut(evaluator.shape, "", why))
            continue
        try:
            name = "bottleneck" if partition == END_TO_END else partition
            cut = _cut(evaluator, name)
        except PlanError:
            cut = _cut(evaluator, LEAST_MEMORY)
        tried[number] = cut
        actions += evaluator.actions
        if cut.least_per_microbatch_s < fastest_s and cut.fits:
            fastest_s = min(fastest_s, cut.per_microbatch_s)
    in_order = [tried[number] for number in sorted(tried)]
    if most == 1 and (first := Candidate.first(in_order)) is not None:
        return [first.evaluator], [other for other in in_order if other is not first], dropped
    in_order.sort(key=Candidate.order)
    return [candidate.evaluator for candidate in in_order[:most]], in_order[most:], dropped


def _search(evaluator: Evaluator, partition: str | tuple[int, ...], effort: Effort, compare: bool) -> _Search:
    """The cuts of the programs for a shape, and the cuts that the request allows.

    Args:
        compare: False: without that of the least memory, which knows no times, where the fastest of the others fits and
            none is refined.
    """
    picks: dict[str, Candidate] = {}
    failed: dict[str, Alternative] = {}

    def add(name: str) -> None:
        try:
            picks[name] = _cut(evaluator, name)
        except PlanError as error:
            failed[name] = Alternative.uncut(evaluator.shape, name, str(error))

    refines = partition == END_TO_END and effort.actions // evaluator.actions > 1
    spares = partition != LEAST_MEMORY and not compare and not refines
    for name in PROGRAMS:
        if not (spares and name == LEAST_MEMORY):
            add(name)
    if spares:
        fastest = min(picks.values(), key=lambda pick: pick.least_per_microbatch_s, default=None)
        if fastest is None or not fastest.fits:
            add(LEAST_MEMORY)
    if partition == END_TO_END and not refines:
        allowed = (*picks.values(),)
    elif partition == END_TO_END:
        refined = _refined(evaluator, picks.values(), effort)
        already = any(pick.layers == refined.layers for pick in picks.values())
        allowed = (*picks.values(),) if already else (*picks.values(), refined)
    elif isinstance(partition, str):
        allowed = (picks[partition],) if partition in picks else ()
    else:
        allowed = (_cut(evaluator, partition),)
    return _Search(evaluator, picks, failed, allowed)


def _cut(evaluator: Evaluator, partition: str | tuple[int, ...]) -> Candidate:
    """The cut of a program, or the given one."""
    if isinstance(partition, str):
        return Candidate(evaluator, partition, evaluator.pick(partition))
    return Candidate(
        evaluator,
        "explicit",
        explicit.partition(partition, evaluator.layers, evaluator.shape.schedule.stages),
    )


def _refined(evaluator: Evaluator, picks: Iterable[Candidate], effort: Effort) -> Candidate:
    """The best cut near `picks`."""
    ordered = sorted(picks, key=Candidate.order)
    starts = list(dict.fromkeys(pick.layers for pick in ordered))
    evaluations = effort.actions // evaluator.actions
    return Candidate(
        evaluator, "refined", refine(starts, evaluator.better, evaluations=evaluations, restarts=_RESTARTS)
    )


def _why_nothing(closest: Candidate, nearest: Candidate) -> str:
    """Why there is no plan: `closest` exceeds the memory least of the allowed cuts, `nearest` of all cuts."""
    evaluator = closest.evaluator.recomputing()
    recomputing = None if evaluator is None else _cut(evaluator, LEAST_MEMORY).prediction
    evaluator = closest.evaluator.without_copies()
    message = shortfall(
        closest.prediction,
        recomputing,
        None if evaluator is None else _cut(evaluator, LEAST_MEMORY).prediction,
    )
    if nearest.prediction.fits:
        other = nearest.name
        return f"{message}. The cut of partition = {other!r} fits; {END_TO_END!r} takes the fastest that does"
    return message


def shortfall(
    closest: Prediction, recomputing: Prediction | None, without_copies: Prediction | None = None
) -> str:
    """The message, as text for people.

    Args:
        closest: the plan that exceeds the memory least.
        recomputing: the same plan with all layers but the last recomputing; None if `closest` already has that.
        without_copies: the same plan without standbys; None if `closest` has none.
    """
    devices = closest.profile.cluster.devices
    rank = max(range(len(closest.excess_bytes)), key=lambda rank: closest.excess_bytes[rank])
    over, limit = closest.excess_bytes[rank], devices[rank].memory_bytes
    peak = closest.memory.ranks[rank].peak
    state = peak.weights + peak.gradients + peak.optimizer + peak.statistics
    alone = ""
    if without_copies is not None and without_copies.fits:
        alone = '; or elastic.redundancy = "checkpoint", which keeps no copies: then it fits'
    copies = f"{peak.standbys:,} for copies of other ranks' layers, " if peak.standbys else ""
    rest = over + limit - state - peak.standbys
    plan = closest.plan
    counts = list(plan.layers_per_stage)
    return (
        f"nothing fits the memory. The closest, {plan.schedule} on {counted(plan.pipeline_ranks, 'rank')} with {counts}"
        f" layers per stage, needs {over + limit:,} bytes on rank {rank}, {over:,} more than the {limit:,} it may use"
        f" ({state:,} for weights, gradients and optimizer state, {copies}{rest:,} for activations and what waits)."
        f" {_relief(state, limit, recomputing)}{alone}"
    )


def _relief(state: int, limit: int, recomputing: Prediction | None) -> str:
    larger = "more ranks (pipeline.ranks) or devices with more memory"
    if state > limit:
        return f"What would help: {larger}; the state alone does not fit, whatever the microbatch"
    smaller = f"a smaller pipeline.microbatch_size, {larger}"
    if recomputing is None:
        return f"What would help: {smaller}; every layer that can save memory so recomputes already"
    lacking = max(recomputing.excess_bytes)
    if lacking:
        return (
            f"What would help: {smaller}; recomputing (pipeline.recompute = true) leaves {lacking:,}"
            " bytes over"
        )
    return f"What would help: pipeline.recompute = true, with which it fits; {smaller}"
