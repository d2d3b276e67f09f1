"""The schedule families by name: what each requires, and `build`, which returns a validated schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from planner.ir import Schedule
from planner.schedule.families.gpipe import gpipe
from planner.schedule.families.interleaved import interleaved
from planner.schedule.families.one_f_one_b import one_f_one_b
from planner.schedule.families.zb_h1 import zb_h1
from planner.schedule.families.zbv import zbv
from planner.schedule.validate import ScheduleError, validate


@dataclass(frozen=True, kw_only=True)
class Family:
    """A schedule family and its constraints."""

    name: str
    function: Callable[[int, int, int], Schedule]
    """(ranks, microbatches, chunks) -> schedule."""
    placement: Callable[[int, int], tuple[int, ...]]
    """(ranks, chunks) -> the rank of each stage."""
    splits_backward: bool
    """Whether it splits each backward into I and W."""
    default_chunks: int = 1
    """Stages per rank, unless the spec says otherwise."""
    least_chunks: int = 1
    most_chunks: int | None = 1
    """None: any number."""
    whole_rounds: bool = False
    """Whether the number of microbatches must be a multiple of the number of ranks."""

    def stages(self, ranks: int, chunks: int) -> int:
        return ranks * chunks

    def check(self, ranks: int, microbatches: int, chunks: int) -> None:
        """Check that this family has a schedule of these sizes.

        Raises:
            ScheduleError: a size does not fit; names one that would.
        """
        for what, size in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
            if size < 1:
                raise ScheduleError(f"{self.name}: {what} = {size}, must be at least 1")
        if chunks < self.least_chunks:
            raise ScheduleError(
                f"{self.name}: {chunks} chunks per rank, needs at least {self.least_chunks};"
                " with one stage per rank use 1f1b"
            )
        if self.most_chunks is not None and chunks > self.most_chunks:
            advice = "interleaved takes any number from 2 up"
            raise ScheduleError(
                f"{self.name}: {chunks} chunks per rank, must be {self.most_chunks}; {advice}"
            )
        if self.whole_rounds and microbatches % ranks:
            below = microbatches // ranks * ranks
            valid = f"{below} or {below + ranks}" if below else f"{ranks}"
            raise ScheduleError(
                f"{self.name}: {microbatches} microbatches on {ranks} ranks, needs a multiple of the ranks:"
                f" use {valid} microbatches, or 1f1b, which takes any number"
            )


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s % P: `chunks` times around the ranks (Megatron-LM's interleaving)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def folded(ranks: int, chunks: int) -> tuple[int, ...]:
    """Down the ranks, up again, and so on: with two chunks a V, first and last stage on rank 0 (ZB-V)."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


_FAMILIES = (
    Family(name="gpipe", function=gpipe, placement=looped, splits_backward=False),
    Family(name="1f1b", function=one_f_one_b, placement=looped, splits_backward=False),
    Family(
        name="interleaved",
        function=interleaved,
        placement=looped,
        splits_backward=False,
        default_chunks=2,
        least_chunks=2,
        most_chunks=None,
        whole_rounds=True,
    ),
    Family(name="zb-h1", function=zb_h1, placement=looped, splits_backward=True),
    Family(
        name="zbv",
        function=zbv,
        placement=folded,
        splits_backward=True,
        default_chunks=2,
        least_chunks=2,
        most_chunks=2,
    ),
)


def families() -> dict[str, Family]:
    """All families by name."""
    return {family.name: family for family in _FAMILIES}


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        ScheduleError: there is none; lists the names and the nearest one.
    """
    known = families()
    if name in known:
        return known[name]
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else "."
    raise ScheduleError(
        f"unknown schedule {name!r}{hint} Known: {', '.join(known)}, and csv:PATH for a table of your own"
    )


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The validated schedule of family `name`; `chunks` None takes the family's default.

    Raises:
        ScheduleError: no such family, or sizes that it does not allow.
    """
    found = family(name)
    chunks = found.default_chunks if chunks is None else chunks
    found.check(ranks, microbatches, chunks)
    schedule = found.function(ranks, microbatches, chunks)
    validate(schedule)
    return schedule
