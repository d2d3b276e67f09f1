"""One job's watch over its ranks' speeds: takes stage times, says which speeds changed, and keeps their past.

Holds state but no clock, no thread and no plan: `planner/adapt/policy.py` decides what a change is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

from planner.adapt.detection import SlowdownChange, SlowdownWatch, after, rebased
from planner.adapt.past import NO_PAST, Past
from planner.adapt.speeds import NONE_KNOWN, NOTHING_EXPECTED, RankSlowdowns, slowdown_of
from planner.observed import StepTimes
from planner.plan import Plan
from planner.profile import Profile

AHEAD_STEPS = 1000
"""Most steps from one report of a rank to its next."""
AGREEING = 3
"""Reports in a row, each on a later step than the one before, that are believed whatever came before them."""

MATERIAL = 1.05
"""Factor by which a rank's level must have drifted for another slowdown to be known of it."""
USUAL = 8
"""Observations in a row on plans not in force, or of another rank's place, that timing no longer explains; nor does it
explain more of them among others."""
SURE = 3.0
"""Or so many standard errors of the level, if these are more: measurements are not independent."""


@dataclass(frozen=True)
class Ignored:
    """An observation that was not used, and why."""

    kind: Literal["plan", "place", "step", "times"]
    """Part that made no sense."""
    reason: str
    usual: bool = False
    """Whether such observations are to be expected now and then: while a plan or a generation changes."""


class Adviser:
    """Tracks the slowdowns of one job's ranks.

    Args:
        profile: of its layers.
        known: what is known already, such as from the log.
        past: how it came to be so.
    """

    def __init__(self, profile: Profile, known: RankSlowdowns = NONE_KNOWN, past: Past = NO_PAST) -> None:
        self._profile = profile
        self.known = known
        """The levels, as of the last change or material drift: noise does not make another plan look better."""
        self._past = past
        """Without what is `watched` now."""
        watched = {rank: SlowdownWatch(noise=noise, count=count) for rank, noise, count in past.watched}
        self._watches: dict[int, SlowdownWatch] = {
            rank: replace(watched.get(rank, SlowdownWatch()), level=level) for rank, level in known.by_rank
        }
        self._turns = Turns()
        self._odd: dict[int, int] = {}
        """Rank -> twice its observations that are to be expected now and then, less its other ones since."""
        self._first_steps: dict[tuple[int, int], int] = {}
        """Plan -> the first step that was trained with it: it warms up and tells nothing."""
        self.newest: dict[int, float] = {}
        """Rank -> its slowdown in its newest step."""
        self._measured_on: dict[int, tuple[tuple[int, ...], bool, int]] = {}
        """Rank -> its layers, and whether weight gradients counted: the profile's errors differ between them."""

    def observe(
        self, observed: StepTimes, plans: Iterable[Plan], members: Sequence[int]
    ) -> tuple[SlowdownChange | None, Ignored | None]:
        """Learn from one rank's step; return the change that it completes, and why it was ignored.

        Args:
            plans: the plan in force, and the one that the ranks are about to follow.
            members: rank by place.
        """
        found = [plan for plan in plans if plan.key == observed.plan]
        who = f"rank {observed.rank}"
        if not found:
            text = f"{who} reports on plan {_version(observed.plan)}, which is not in force"
            return None, self._usual(observed.rank, "plan", text)
        if not 0 <= observed.place < len(members) or members[observed.place] != observed.rank:
            return None, self._usual(observed.rank, "place", f"{who} does not hold place {observed.place}")
        self._odd[observed.rank] = max(0, self._odd.get(observed.rank, 0) - 1)
        if why := self._turns.refusal(observed.rank, observed.step):
            return None, Ignored("step", f"a report of {who} is ignored: {why}")
        plan = found[0]
        parts: list[float] = []
        for times in (observed.times, *observed.halves):
            part, why = slowdown_of(
                self._profile,
                plan,
                plan.place(observed.place).rank,
                times,
                frozen=observed.frozen,
                prefix=observed.prefix,
            )
            if part is not None:
                parts.append(part)
            elif times is observed.times or why != NOTHING_EXPECTED:
                text = f"the times of {who} in step {observed.step} are ignored: {why}"
                return None, Ignored("times", text)
        slowdown, *halves = parts
        first = self._first_steps.get(observed.plan, observed.step)
        self._first_steps[observed.plan] = min(first, observed.step)
        if observed.step <= first:
            return None, None
        self.newest[observed.rank] = slowdown
        measured_on = plan.layers_of_place(observed.place), observed.frozen, observed.prefix
        watch = self._watches.get(observed.rank, SlowdownWatch())
        if self._measured_on.setdefault(observed.rank, measured_on) != measured_on:
            watch = rebased(watch, slowdown)
        self._measured_on[observed.rank] = measured_on
        change = None
        for part in halves or (slowdown,):
            watch, found = after(watch, observed.step, part)
            change = found or change
        self._watches[observed.rank] = watch
        if change is not None:
            self._past = self._past.after(observed.rank, change)
        if watch.level is not None and (change is not None or self._has_drifted(observed.rank, watch)):
            self.known = self.known.but([(observed.rank, watch.level)])
        return change, None

    def _has_drifted(self, rank: int, watch: SlowdownWatch) -> bool:
        """Whether the level is another one than what is known of the rank, beyond its noise."""
        (known,) = self.known.of((rank,))
        if known is None or watch.level is None:
            return True
        return abs(math.log(watch.level / known)) > max(math.log(MATERIAL), SURE * watch.uncertainty)

    def uncertainty(self, ranks: Sequence[int]) -> float:
        """The largest standard error of the logarithm of what is known of `ranks`."""
        return max((self._watches[rank].uncertainty for rank in ranks if rank in self._watches), default=0.0)

    def _usual(self, rank: int, kind: Literal["plan", "place"], reason: str) -> Ignored:
        """An ignored observation that is `usual`, unless there are too many in a row."""
        self._odd[rank] = self._odd.get(rank, 0) + 2
        return Ignored(kind, reason, usual=self._odd[rank] < 2 * USUAL)

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget all but `ranks`: a new generation begins, and steps warm up again."""
        kept = frozenset(ranks)
        self._watches = {rank: watch for rank, watch in self._watches.items() if rank in kept}
        self._past = self._past.among(kept)
        self._measured_on = {rank: on for rank, on in self._measured_on.items() if rank in kept}
        self._first_steps, self._odd, self._turns = {}, {}, Turns()
        self.newest = {rank: slowdown for rank, slowdown in self.newest.items() if rank in kept}
        self.known = self.known.among(kept)

    @property
    def step(self) -> int:
        """The newest step by most ranks; 0 before the first report."""
        return self._turns.step

    @property
    def past(self) -> Past:
        """State beside `known` from which another adviser begins."""
        watched = tuple(
            (rank, watch.noise, watch.count)
            for rank, watch in sorted(self._watches.items())
            if watch.level is not None
        )
        return replace(self._past, watched=watched)

    def note_links(self, step: int) -> None:
        """A link has changed at `step`."""
        self._past = replace(self._past, links_changed=step)


def _version(plan: tuple[int, int]) -> str:
    return f"{plan[0]}.{plan[1]}"


@dataclass(eq=False)
class Turns:
    """Whether a rank's reports come in the order of its steps. Knows no clock.

    A report on an older step than the rank's newest, or on one far ahead, is not believed. When several in a row agree,
    the rank is there after all: such as after steps that were undone, or after a first report that was nonsense.
    """

    _newest: dict[int, int] = field(init=False, default_factory=dict)
    _doubted: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)
    """Rank -> the steps of its reports in a row that were not believed."""

    @property
    def step(self) -> int:
        """The newest step by most ranks; 0 before the first report."""
        return median_low(self._newest.values()) if self._newest else 0

    def refusal(self, rank: int, step: int) -> str:
        """Why a report on `step` is not believed; "" if it is."""
        if step < 0:
            return f"there is no step {step}"
        newest = self._newest.get(rank, step)
        doubted = self._doubted.pop(rank, ())
        if newest <= step <= newest + AHEAD_STEPS:
            self._newest[rank] = step
            return ""
        follows = bool(doubted) and doubted[-1] < step <= doubted[-1] + AHEAD_STEPS
        doubted = (*doubted, step) if follows else (step,)
        if len(doubted) == AGREEING:
            self._newest[rank] = step
            return ""
        self._doubted[rank] = doubted
        return f"step {step} comes after step {newest}"
