"""The shapes of pipelines to choose from: family, ranks, chunks and microbatches, before any layer is placed.

Knows no cost. Shapes that a family does not allow are returned with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.ir import Schedule
from planner.schedule.registry import Family, build, families, family
from planner.schedule.validate import ScheduleError
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """A pipeline without its cut."""

    name: str
    """Family, or the name of the user's own schedule."""
    ranks: int
    chunks: int
    """Most stages on any rank."""
    microbatches: int
    given: Schedule | None = None
    """The user's own schedule."""

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, without recomputes."""
        return self.given or build(self.name, self.ranks, self.microbatches, self.chunks)

    @property
    def stages(self) -> int:
        return self.given.stages if self.given else family(self.name).stages(self.ranks, self.chunks)

    @property
    def most_actions(self) -> int:
        """Most actions that the schedule can have, without recomputes; needs no schedule."""
        return (3 if self.given or family(self.name).splits_backward else 2) * (
            self.ranks * self.chunks * self.microbatches
        )


@dataclass(frozen=True, kw_only=True)
class RefusedShape:
    """A shape that its family does not allow, or that has more stages than the model has layers."""

    shape: PipelineShape
    why: str


def shape_of(schedule: Schedule) -> PipelineShape:
    """The shape of the user's own schedule."""
    chunks = max(len(schedule.stages_of_rank(rank)) for rank in range(schedule.ranks))
    return PipelineShape(
        name=schedule.name,
        ranks=schedule.ranks,
        chunks=chunks,
        microbatches=schedule.microbatches,
        given=schedule,
    )


def shapes(
    *,
    layers: int,
    most_ranks: int,
    ranks: int | None,
    name: str | None,
    chunks: int | None,
    microbatches: int | None,
) -> tuple[list[PipelineShape], list[RefusedShape]]:
    """All shapes with the given arguments and any value for those that are None, most ranks first; and the refused
    ones.

    Ranks are all counts up to 8, then powers of two and one and a half times these, and `most_ranks`. Microbatches are
    once, twice and four times the ranks.

    Raises:
        ScheduleError: no such family.
    """
    chosen = families().values() if name is None else (family(name),)
    built: list[PipelineShape] = []
    refused: list[RefusedShape] = []
    for size in _rank_counts(most_ranks) if ranks is None else (ranks,):
        for each in chosen:
            per_rank = each.default_chunks if chunks is None else chunks
            for count in (size, 2 * size, 4 * size) if microbatches is None else (microbatches,):
                shape = PipelineShape(name=each.name, ranks=size, chunks=per_rank, microbatches=count)
                try:
                    _check(each, shape, layers)
                except ScheduleError as error:
                    refused.append(RefusedShape(shape=shape, why=str(error)))
                else:
                    built.append(shape)
    return built, refused


def _check(family: Family, shape: PipelineShape, layers: int) -> None:
    family.check(shape.ranks, shape.microbatches, shape.chunks)
    stages = family.stages(shape.ranks, shape.chunks)
    if stages > layers:
        raise ScheduleError(
            f"{family.name}: {counted(shape.ranks, 'rank')} x {counted(shape.chunks, 'chunk')} are"
            f" {counted(stages, 'stage')}, and the model has {counted(layers, 'layer')}: use at most"
            f" {counted(layers // shape.chunks, 'rank')}, or more layers"
        )


def _rank_counts(most: int) -> list[int]:
    counts = {most, *range(1, min(most, 8) + 1)}
    power = 8
    while power <= most:
        counts |= {size for size in (power, power * 3 // 2) if size <= most}
        power *= 2
    return sorted(counts, reverse=True)
