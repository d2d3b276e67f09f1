"""The planner of a job that adapts: it gathers what ranks observe, keeps what is known of them, and decides on moves.

Holds state but no clock and no thread. Its process is `planner/actor.py`'s; killed and started anew it begins with what
the log knows (`LiveStart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from planner.adapt.adviser import Adviser
from planner.adapt.forest_slowdowns import ForestSlowdowns
from planner.adapt.layer_times import Factors, LayerTimeCorrections
from planner.adapt.link_times import Links, LinkSlowdowns
from planner.adapt.past import NO_PAST, Past
from planner.adapt.policy import MoveDecision, SpeedForecast, decide
from planner.adapt.samples import believed
from planner.adapt.speeds import NONE_KNOWN, RankSlowdowns
from planner.freezing import Ratios
from planner.interference.model_file import forest_from
from planner.interference.predictor import Predictor
from planner.observed import StepTimes
from planner.plan import Plan
from planner.profile import Profile
from planner.search.replan import Replanner

MOST_SAID = 64
"""Nonsense of so many ranks and kinds is told; all of it is ignored."""


@dataclass(frozen=True, kw_only=True)
class LiveStart:
    """Initial state of a planner."""

    profile: Profile
    known: RankSlowdowns = NONE_KNOWN
    """The ranks' slowdowns, from the log."""
    past: Past = NO_PAST
    """History of the slowdowns, from the log."""
    factors: Factors = ()
    """On the layers' times, from the log."""
    links: Links = ()
    """Slow links, from the log."""
    forest: bytes | None = None
    """The interference model, as a file's content; None: measured slowdowns stand for all layers."""
    record: str | None = None
    """The file to which the planner writes what it is told and answers (`recording.py`); None: it writes nothing."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """State of a planner after some observations."""

    known: RankSlowdowns
    past: Past
    """History of the slowdowns."""
    changes: tuple[str, ...]
    """Changes of speed that these observations completed, in words."""
    ignored: tuple[tuple[int, str], ...]
    """(rank, why) of observations that make no sense: once for each rank and kind of nonsense."""
    lasting_steps: int
    age: int
    """Steps since any speed last changed."""
    newest: tuple[tuple[int, float], ...] = ()
    """(rank, slowdown in its newest step)."""
    factors: Factors = ()
    """On the layers' times, if these observations have changed them much."""
    links: Links | None = None
    """Slow links, if these observations have changed them much."""
    link_changes: tuple[str, ...] = ()
    """Changes of links that these observations completed, in words."""
    warnings: tuple[str, ...] = ()
    """Warnings about the planner itself, for people."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Whether to move, for a job as it is now."""

    now: Plan
    domains: tuple[str, ...]
    """Failure domain by place."""
    members: tuple[int, ...]
    """Rank by place."""
    step: int
    remaining_steps: int
    ratios: Ratios | None = None
    """Frozen shares of weight gradients, `ratios[layer][microbatch]`; None: nothing is frozen."""
    r_max: float | None = None
    """Largest mean freeze ratio of a stage, if the freeze program is solved again for whatever is decided; None: the
    ratios stay."""


class LivePlanner:
    """Planner of one running job, and its state."""

    def __init__(self, start: LiveStart) -> None:
        self._adviser = Adviser(start.profile, start.known, start.past)
        self._times = LayerTimeCorrections(start.profile, start.factors)
        self._links = LinkSlowdowns(start.profile, start.links)
        self._replanner: Replanner | None = None
        self._predictor: Predictor | None = None
        if start.forest is not None:
            self._predictor = Predictor(forest_from(start.forest, "the job's interference model").forest)
        self._sampled: dict[int, Mapping[str, float]] = {}
        """Rank -> the newest features of its device and host."""
        self._said: set[tuple[int, str]] = set()
        """(rank, kind) of the nonsense that was told."""

    def observe(self, batch: Iterable[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        """Learn from what ranks observed.

        Args:
            plans: the plan in force, and the one that the ranks are about to follow.
            members: rank by place.
        """
        changes: list[str] = []
        link_changes: list[str] = []
        ignored: list[tuple[int, str]] = []
        moved = False

        def ignore(rank: int, kind: str, why: str) -> None:
            """Say so once for each rank and kind of nonsense."""
            if (rank, kind) not in self._said and len(self._said) < MOST_SAID:
                self._said.add((rank, kind))
                ignored.append((rank, why))

        for observed in batch:
            rank = observed.rank
            change, refusal = self._adviser.observe(observed, plans, members)
            if refusal is not None:
                if not refusal.usual:
                    ignore(rank, refusal.kind, refusal.reason)
                continue
            if observed.surroundings is not None:
                self._sampled[rank], wrong = believed(observed.surroundings)
                if wrong:
                    why = f"features that rank {rank} sampled by step {observed.step} are ignored: {wrong}"
                    ignore(rank, "surroundings", why)
            if change is not None and change.before is not None:
                changes.append(f"rank {rank} {change.reason}")
            plan = next(plan for plan in plans if plan.key == observed.plan)
            moved = self._times.observe(observed, plan) or moved
            linked, nonsense = self._links.observe(observed, members)
            link_changes += linked
            for why in nonsense:
                ignore(rank, "links", why)
        step = self._adviser.step
        relinked = self._links.changed(step)
        if relinked:
            self._adviser.note_links(step)
        past = self._adviser.past
        return Heard(
            known=self._adviser.known,
            past=past,
            changes=tuple(changes),
            ignored=tuple(ignored),
            lasting_steps=past.lasting_steps(step),
            age=past.age(step),
            newest=tuple(sorted(self._adviser.newest.items())),
            factors=self._times.factors if moved else (),
            links=self._links.links() if relinked else None,
            link_changes=tuple(link_changes),
        )

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget all but `ranks`: a new generation begins."""
        kept = frozenset(ranks)
        self._adviser.keep(kept)
        self._links.keep(kept)
        self._sampled = {rank: sample for rank, sample in self._sampled.items() if rank in kept}

    def plan_with(self, replanner: Replanner) -> None:
        """Decide with `replanner` from now on."""
        self._replanner = replanner

    def decide(self, question: Question) -> MoveDecision:
        """Whether another cut pays for what is known now.

        Raises:
            ValueError: it has no replanner, or the job no profile.
        """
        return self.considering(question)()

    def considering(self, question: Question) -> Callable[[], MoveDecision]:
        """`decide` for what is known now, to be called in any thread: what is learnt meanwhile does not count.

        Raises:
            ValueError: it has no replanner. The call raises it if the job has no profile.
        """
        if self._replanner is None:
            raise ValueError("the planner has not been told what to plan with")
        replanner, past = self._replanner, self._adviser.past
        known = self._adviser.known.of(question.members)
        before = past.known_before(self._adviser.known)
        forecast = SpeedForecast(
            remaining_steps=question.remaining_steps,
            lasting_steps=past.lasting_steps(question.step),
            before=None if before is None else before.of(question.members),
            share=past.share(),
            uncertainty=self._adviser.uncertainty(question.members),
        )
        sampled = [self._sampled.get(rank, {}) for rank in question.members]

        def answer() -> MoveDecision:
            return decide(
                replanner,
                question.now,
                question.domains,
                known,
                forecast,
                ratios=question.ratios,
                r_max=question.r_max,
                predicts=self._predicts(replanner, question, known, sampled),
            )

        return answer

    def _predicts(
        self,
        replanner: Replanner,
        question: Question,
        measured: Sequence[float | None],
        sampled: Sequence[Mapping[str, float]],
    ) -> ForestSlowdowns | None:
        """The interference model's predictor for what places may hold; None without one."""
        known = [slowdown for slowdown in measured if slowdown is not None]
        if self._predictor is None or replanner.profile is None or not known:
            return None
        plan = question.now
        return ForestSlowdowns(
            self._predictor,
            replanner.profile.model,
            [median_low(known) if slowdown is None else slowdown for slowdown in measured],
            [
                tuple(
                    span
                    for span, rank in zip(plan.layers, plan.stage_ranks, strict=True)
                    if rank == plan.place(place).rank
                )
                for place in range(len(measured))
            ],
            sampled,
        )
