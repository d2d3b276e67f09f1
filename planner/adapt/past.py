"""History of the speeds of a job's ranks, and how long the present ones last by that. Pure.

It outlives the planner and the controller: the log keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from planner.adapt.detection import SlowdownChange
from planner.adapt.speeds import RankSlowdowns

LASTING_STEPS = 200
"""Assumed duration of speeds before the job has seen any."""
REMEMBERED = 8
"""Newest durations of higher and of lower speeds of which the median is taken, with `LASTING_STEPS` beside them."""
COMPARABLE = 0.5
"""Share of the logarithm of a change's factor: what lesser changes began or ended says nothing of how long it lasts."""
TOGETHER_STEPS = 3
"""Ranks that change within fewer steps are taken to change back together."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """History of the speeds of a job's ranks."""

    changed: tuple[tuple[int, int], ...] = ()
    """(rank, the step since which its speed has been what it is), ascending."""
    before: tuple[tuple[int, float], ...] = ()
    """(rank, its slowdown before its last change), ascending; ranks that have not changed are left out."""
    slow_steps: tuple[tuple[int, float], ...] = ()
    """(how long it lasted, the lesser factor of the changes that began and ended it), of the newest speeds of ranks
    that had become slower; the newest last."""
    fast_steps: tuple[tuple[int, float], ...] = ()
    """The same of ranks that had become faster, or whose speed was their first."""
    slower: bool = True
    """Whether the last change was one to a lower speed."""
    factor: float = 1.0
    """Factor of the last change, at least 1."""
    links_changed: int | None = None
    """The step at which a link changed last."""
    watched: tuple[tuple[int, float, int], ...] = ()
    """(rank, noise of its measurements, how many of them its level has followed), ascending, as in `Watch`."""

    def after(self, rank: int, change: SlowdownChange) -> Past:
        """This, and a change of `rank`."""
        changed = dict(self.changed)
        began = changed.get(rank)
        if change.before is None:
            # The rank's first level is no change.
            changed.setdefault(rank, change.since)
            return replace(self, changed=tuple(sorted(changed.items())))
        changed[rank] = change.since
        slower, factor = change.after > change.before, _factor(change.before, change.after)
        before = dict(self.before)
        past = replace(
            self,
            changed=tuple(sorted(changed.items())),
            before=tuple(sorted({**before, rank: change.before}.items())),
            slower=slower,
            factor=factor,
        )
        if began is None:
            return past
        if rank in before:
            factor = min(factor, _factor(before[rank], change.before))
        lasted = max(1, change.since - began), factor
        if slower:
            return replace(past, fast_steps=(*self.fast_steps, lasted)[-REMEMBERED:])
        return replace(past, slow_steps=(*self.slow_steps, lasted)[-REMEMBERED:])

    def among(self, ranks: Iterable[int]) -> Past:
        """History of `ranks` alone; durations of speeds still come from all of the job's ranks."""
        kept = frozenset(ranks)
        return replace(
            self,
            changed=tuple(entry for entry in self.changed if entry[0] in kept),
            before=tuple(entry for entry in self.before if entry[0] in kept),
            watched=tuple(entry for entry in self.watched if entry[0] in kept),
        )

    def age(self, step: int) -> int:
        """Steps since the speed of a rank or a link last changed."""
        if not self.changed:
            return 0
        return max(0, step - max(*(since for _, since in self.changed), self.links_changed or 0))

    def lasting_steps(self, step: int) -> int:
        """Steps that the ranks' speeds will last after `step`: the rest of what is usual in this job, or as many as
        they have lasted already."""
        age = self.age(step)
        return max(round(self._usual_steps(self.slower)) - age, age)

    def share(self) -> float:
        """Share of time with the ranks' present speeds, if these alternate with those before."""
        present, other = self._usual_steps(self.slower), self._usual_steps(not self.slower)
        return present / (present + other)

    def known_before(self, known: RankSlowdowns) -> RankSlowdowns | None:
        """Slowdowns before the last change of a rank and of those that changed together with it; None: none did, or a
        link did after them.

        Args:
            known: what is known now.
        """
        changed, before = dict(self.changed), dict(self.before)
        newest = max((changed[rank] for rank in before), default=-1)
        if newest < 0 or (self.links_changed is not None and self.links_changed > newest):
            return None
        return known.but(
            (rank, level) for rank, level in before.items() if changed[rank] > newest - TOGETHER_STEPS
        )

    def _usual_steps(self, slower: bool) -> float:
        least = self.factor**COMPARABLE
        lasted = self.slow_steps if slower else self.fast_steps
        seen = [steps for steps, factor in lasted if factor >= least]
        return median((LASTING_STEPS, *seen))


def _factor(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


NO_PAST = Past()
"""Before anything is measured."""
