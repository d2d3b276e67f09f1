"""One rank's part of a schedule: its own actions, and what they exchange with other ranks' actions.

Its size depends on the rank's own actions only, however many ranks there are: the controller cuts it for each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir import Program, Schedule
from planner.lowering import Group, lower
from planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """One pipeline rank's part of a `Schedule`, whose other fields have the meaning that they have there."""

    rank: int
    """The pipeline rank."""
    ranks: int
    """Ranks of the pipeline."""
    stages: int
    """Stages of the pipeline."""
    microbatches: int
    frozen_stages: int
    actions: Program
    """In program order."""
    rank_of_stage: Mapping[int, int]
    """For this rank's stages, and those before and after each of them."""
    groups: tuple[Group, ...]
    """Its messages in a window, in the one order that all ranks follow: `planner.lowering`."""
    schedule_sha256: str
    """Digest of the entire schedule."""

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that this rank holds, ascending."""
        return tuple(stage for stage, rank in sorted(self.rank_of_stage.items()) if rank == self.rank)


def rank_programs(schedule: Schedule) -> tuple[RankProgram, ...]:
    """Cut a validated schedule, for each rank of the pipeline."""
    groups, home, sha256 = lower(schedule), schedule.rank_of_stage, _sha256(schedule)
    near: list[dict[int, int]] = [{} for _ in schedule.programs]
    for stage, rank in home.items():
        near[rank] |= {other: home[other] for other in (stage - 1, stage, stage + 1) if other in home}
    return tuple(
        RankProgram(
            rank=rank,
            ranks=schedule.ranks,
            stages=schedule.stages,
            microbatches=schedule.microbatches,
            frozen_stages=schedule.frozen_stages,
            actions=program,
            rank_of_stage=near[rank],
            groups=groups[rank],
            schedule_sha256=sha256,
        )
        for rank, program in enumerate(schedule.programs)
    )


def place_programs(plan: Plan, schedules: Sequence[Schedule]) -> tuple[RankProgram, ...]:
    """Per place of `plan`, its part of its pipeline's schedule.

    Args:
        schedules: of each pipeline; a single one is that of all.
    """
    # Pipelines with equal shares have one schedule.
    cut = {id(schedule): rank_programs(schedule) for schedule in schedules}
    of_pipeline = [cut[id(schedule)] for schedule in schedules] * (
        plan.pipeline_count if len(schedules) == 1 else 1
    )
    return tuple(program for programs in of_pipeline for program in programs)


def _sha256(schedule: Schedule) -> str:
    fields = (
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        schedule.frozen_stages,
        schedule.synchronous,
    )
    digest = hashlib.sha256(repr(fields).encode())
    for program in schedule.programs:
        digest.update(" ".join(map(str, program)).encode() + b"\n")
    return digest.hexdigest()
