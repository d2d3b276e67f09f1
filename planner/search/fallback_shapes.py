"""The pipelines that another number of ranks can run in place of a job's first one. Knows no cost.

Microbatches and replicas determine the trajectory and stay; ranks, stages and family do not change the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir import Schedule
from planner.plan import Plan
from planner.schedule.registry import Family, families
from planner.schedule.validate import ScheduleError
from planner.search.shapes import PipelineShape, shape_of
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class Option:
    """A number of copies of one shape."""

    shape: PipelineShape
    pipelines: int

    @property
    def ranks(self) -> int:
        return self.pipelines * self.shape.ranks


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """The options for a number of ranks, most ranks first."""

    own: tuple[Option, ...]
    """Options with the plan's own family or the user's own table."""
    others: tuple[Option, ...]
    """Options with other families, the most similar first, each with as many ranks as it can use."""
    why_not: str
    """Why the own family cannot use as many ranks as another one; empty if it can."""

    @property
    def best(self) -> tuple[Option, ...]:
        """The options to compare: the own family's, unless another one can use more ranks."""
        return (*self.own, *self.others) if self.why_not else self.own


def options(first: Plan, schedule: Schedule, ranks: int, pipelines: int | None = None) -> ShapeOptions:
    """The options of `ranks` ranks in place of `first`, whose schedule is `schedule`.

    There are at most as many pipelines as replicas, and each has at most an equal part of the ranks.

    Args:
        pipelines: how many there are to be, if there are ranks for them; None: any number.
    """
    layers, known = first.layers[-1][1], families()
    own: list[Option] = []
    others: list[Option] = []
    why_not = ""
    fully = False
    highest = min(first.replicas, ranks)
    counts = range(highest, 0, -1) if pipelines is None else (min(pipelines, highest),)
    for count in counts:
        most = ranks // count
        if first.schedule in known:
            family = known[first.schedule]
            found, refusal = _of_family(family, first.chunks, first.microbatches, most, layers)
        else:
            table = shape_of(schedule)
            found = [table] if table.ranks <= most else []
            refusal = f"its table is for {counted(table.ranks, 'rank')}, and there are {most}"
        largest = max((shape.ranks for shape in found), default=0)
        own += [Option(shape=shape, pipelines=count) for shape in found]
        rivals = [
            shapes[0]
            for family in _most_similar(first, schedule)
            if (shapes := _of_family(family, family.default_chunks, first.microbatches, most, layers)[0])
        ]
        others += [Option(shape=shape, pipelines=count) for shape in rivals]
        if any(shape.ranks > largest for shape in rivals):
            why_not = refusal
        else:
            fully = True
    return ShapeOptions(
        own=tuple(sorted(own, key=lambda option: -option.ranks)),
        others=tuple(sorted(others, key=lambda option: -option.ranks)),
        why_not="" if fully else why_not,
    )


def _of_family(
    family: Family, chunks: int, microbatches: int, most: int, layers: int
) -> tuple[list[PipelineShape], str]:
    """The family's shapes of up to `most` ranks, the largest first; and why none has `most`, if so."""
    found: list[PipelineShape] = []
    why_not = ""
    for ranks in range(min(most, layers), 0, -1):
        refusal = _refusal(family, ranks, chunks, microbatches, layers)
        if refusal:
            why_not = why_not or refusal
        else:
            found.append(
                PipelineShape(name=family.name, ranks=ranks, chunks=chunks, microbatches=microbatches)
            )
    return found, why_not


def _refusal(family: Family, ranks: int, chunks: int, microbatches: int, layers: int) -> str:
    """Why the family does not allow these sizes, without advice, as they are fixed. Empty if it allows them."""
    stages = family.stages(ranks, chunks)
    if stages > layers:
        there = f"{counted(stages, 'stage')}, and the model has {counted(layers, 'layer')}"
        return f"{family.name} on {counted(ranks, 'rank')} has {there}"
    if family.whole_rounds and microbatches % ranks:
        wanted = f"a multiple of {ranks} microbatches, and there are {microbatches}"
        return f"{family.name} on {counted(ranks, 'rank')} needs {wanted}"
    try:
        family.check(ranks, microbatches, chunks)
    except ScheduleError as error:
        return str(error)
    return ""


def _most_similar(first: Plan, schedule: Schedule) -> list[Family]:
    """The other families: first those that split backwards like the first plan's, then those with as many chunks.

    GPipe is left out: 1F1B fits wherever GPipe does, keeps less and is as fast.
    """
    splits = schedule.splits_backward
    others = [family for name, family in families().items() if name not in (first.schedule, "gpipe")]
    return sorted(
        others,
        key=lambda family: (family.splits_backward != splits, family.default_chunks != first.chunks),
    )
