"""One job's watch over its ranks' speeds: takes stage times, says which speeds changed, and how long speeds last.

Holds state but no clock, no thread and no plan: `planner/adapt/policy.py` decides what a change is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from planner.adapt.detection import Change, Watch, after, rebased
from planner.adapt.speeds import NOTHING_EXPECTED, Slowdowns, slowdown_of
from planner.adapt.turns import Turns
from planner.observed import StepTimes
from planner.plan import Plan
from planner.profile import Profile

LASTING_STEPS = 200
"""How long speeds are taken to last before the job has seen it."""
REMEMBERED = 8
"""Newest durations of higher and of lower speeds of which the median is taken, with `LASTING_STEPS` beside them."""
MATERIAL = 1.05
"""Factor by which a rank's level must have drifted for another slowdown to be known of it."""
TOGETHER_STEPS = 3
"""Ranks that change within fewer steps are taken to change back together."""
USUAL = 8
"""So many observations in a row on plans that are not in force, or of another's place, are no matter of timing; nor are
more of them among others."""
SURE = 3.0
"""Or so many standard errors of the level, if these are more: measurements are not independent."""


@dataclass(frozen=True)
class Ignored:
    """An observation that was not used, and why."""

    kind: Literal["plan", "place", "step", "times"]
    """What made no sense."""
    reason: str
    usual: bool = False
    """Whether such observations are to be expected now and then: while a plan or a generation changes."""


class Adviser:
    """What is known of one job's ranks.

    Args:
        profile: of its layers.
        known: what is known already, such as from the log.
    """

    def __init__(self, profile: Profile, known: Slowdowns | None = None, since: int | None = None) -> None:
        self._profile = profile
        self.known = known or Slowdowns()
        """The levels, as of the last change or material drift: noise does not make another plan look better."""
        self._watches: dict[int, Watch] = {rank: Watch(level=level) for rank, level in self.known.by_rank}
        self._changed_at: dict[int, int] = {}
        if since is not None:
            self._changed_at = {rank: since for rank, _ in self.known.by_rank}
        self._links_changed: int | None = None
        """The step at which a link changed last."""
        self._before: dict[int, float] = {}
        """Rank -> its slowdown before its last change."""
        self._durations: dict[bool, list[int]] = {True: [], False: []}
        """How long speeds lasted: those of ranks that had become slower, and of ranks that had become faster."""
        self._slower = True
        """Whether the last change was one to a lower speed."""
        self._turns = Turns()
        self._odd: dict[int, int] = {}
        """Rank -> twice its observations that are to be expected now and then, less its other ones since."""
        self._first_steps: dict[tuple[int, int], int] = {}
        """Plan -> the first step that was trained with it: it warms up and tells nothing."""
        self.newest: dict[int, float] = {}
        """Rank -> its slowdown in its newest step."""
        self._measured_on: dict[int, tuple[tuple[int, ...], bool]] = {}
        """Rank -> its layers, and whether weight gradients counted: the profile's errors differ between them."""

    def take(
        self, observed: StepTimes, plans: Iterable[Plan], members: Sequence[int]
    ) -> tuple[Change | None, Ignored | None]:
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
                self._profile, plan, plan.place(observed.place).rank, times, frozen=observed.frozen
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
        measured_on = plan.layers_of_place(observed.place), observed.frozen
        watch = self._watches.get(observed.rank, Watch())
        if self._measured_on.setdefault(observed.rank, measured_on) != measured_on:
            watch = rebased(watch, slowdown)
        self._measured_on[observed.rank] = measured_on
        change = None
        for part in halves or (slowdown,):
            watch, found = after(watch, observed.step, part)
            change = found or change
        self._watches[observed.rank] = watch
        if change is not None:
            self._note(observed.rank, change)
        if watch.level is not None and (change is not None or self._has_drifted(observed.rank, watch)):
            self.known = self.known.but([(observed.rank, watch.level)])
        return change, None

    def _has_drifted(self, rank: int, watch: Watch) -> bool:
        """Whether the level is another one than what is known of the rank, beyond its noise."""
        (known,) = self.known.of((rank,))
        if known is None or watch.level is None:
            return True
        return abs(math.log(watch.level / known)) > max(math.log(MATERIAL), SURE * watch.uncertainty)

    def uncertainty(self, ranks: Sequence[int]) -> float:
        """The largest standard error of the logarithm of what is known of `ranks`."""
        return max((self._watches[rank].uncertainty for rank in ranks if rank in self._watches), default=0.0)

    def _usual(self, rank: int, kind: Literal["plan", "place"], reason: str) -> Ignored:
        """Of an observation that is to be expected now and then, unless there are too many in a row."""
        self._odd[rank] = self._odd.get(rank, 0) + 2
        return Ignored(kind, reason, usual=self._odd[rank] < 2 * USUAL)

    def with_known(self, known: Slowdowns, since: int) -> Adviser:
        """Another one for the same job, which begins with what is `known` and has not changed since step `since`."""
        return Adviser(self._profile, known, since)

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget all but `ranks`: a new generation begins, and steps warm up again."""
        kept = frozenset(ranks)
        self._watches = {rank: watch for rank, watch in self._watches.items() if rank in kept}
        self._changed_at = {rank: step for rank, step in self._changed_at.items() if rank in kept}
        self._before = {rank: level for rank, level in self._before.items() if rank in kept}
        self._measured_on = {rank: on for rank, on in self._measured_on.items() if rank in kept}
        self._first_steps, self._odd, self._turns = {}, {}, Turns()
        self.newest = {rank: slowdown for rank, slowdown in self.newest.items() if rank in kept}
        self.known = self.known.among(kept)

    @property
    def step(self) -> int:
        """The newest step by most ranks; 0 before the first report."""
        return self._turns.step

    def lasting_steps(self, step: int) -> int:
        """How many more steps the ranks' speeds will last after `step`: what is left of what is usual in this job, or
        as long as they have lasted already."""
        age = self.age(step)
        return max(round(self._usual_steps(self._slower)) - age, age)

    def share(self) -> float:
        """Of the time, if the ranks' present speeds and those before come and go in turn: that of the present ones."""
        present, other = self._usual_steps(self._slower), self._usual_steps(not self._slower)
        return present / (present + other)

    def _usual_steps(self, slower: bool) -> float:
        return median((LASTING_STEPS, *self._durations[slower]))

    def age(self, step: int) -> int:
        """For how many steps no speed of a rank or a link has changed."""
        if not self._changed_at:
            return 0
        return max(0, step - max(*self._changed_at.values(), self._links_changed or 0))

    def note_links(self, step: int) -> None:
        """A link has changed at `step`."""
        self._links_changed = step

    def before(self, ranks: Sequence[int]) -> tuple[float | None, ...] | None:
        """The slowdowns of `ranks` before they changed last, those that changed about then together; None: they never
        did, or a link did after them."""
        newest = max((self._changed_at[rank] for rank in self._before), default=-1)
        if newest < 0 or (self._links_changed is not None and self._links_changed > newest):
            return None
        changed = [rank for rank in self._before if self._changed_at[rank] > newest - TOGETHER_STEPS]
        return self.known.but((rank, self._before[rank]) for rank in changed).of(ranks)

    def _note(self, rank: int, change: Change) -> None:
        before = self._changed_at.get(rank)
        if change.before is None:
            # The rank's first level is no change.
            self._changed_at.setdefault(rank, change.since)
            return
        slower = change.after > change.before
        if before is not None:
            ended = self._durations[not slower]
            ended.append(max(1, change.since - before))
            del ended[:-REMEMBERED]
        self._slower = slower
        self._changed_at[rank] = change.since
        self._before[rank] = change.before


def _version(plan: tuple[int, int]) -> str:
    return f"{plan[0]}.{plan[1]}"
