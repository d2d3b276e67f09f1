"""A plan that replaces the one in force at a commit, without forming a new group, and whether a rank is ready for it.

Only values and comparisons: it moves no layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from planner.arrivals import Arrivals, new_copies
from planner.codec import json_values
from planner.plan import Plan, PlanError
from planner.rank_program import RankProgram
from planner.shards import WHOLE, Piece
from planner.shares import check_shares
from workers.commit.commit import Prepared
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState


@dataclass(frozen=True)
class NextPlan:
    """A plan with one rank's part of its schedule."""

    plan: Plan
    program: RankProgram
    held: Arrivals = ()
    """Layers, or shards, whose owners hold back updates under this plan, and where each will go."""

    @cached_property
    def key(self) -> Prepared:
        """The plan's epoch, its version, and a digest of plan, schedule and held layers."""
        # With uneven shares the plan names a family, and each pipeline has its schedule for its own share.
        schedule = "" if self.plan.shares else self.program.schedule_sha256
        said = f"{json.dumps(json_values(self.plan), sort_keys=True)}\n{schedule}\n{self.held}"
        return *self.plan.key, hashlib.sha256(said.encode()).hexdigest()

    def ready(
        self, place: int, owned: Collection[Piece], current: Collection[Piece], coming: Collection[Piece]
    ) -> bool:
        """Whether `place` has the states with which to follow this plan from the next step on.

        Args:
            owned: layers, or shards, that `place` owns now.
            current: copies that `place` keeps and that are up to date and on its device.
            coming: copies that `place` keeps and that are not up to date yet.
        """
        own = self.plan.pieces_of_place(place)
        needed = {*own, *self.plan.copies_at(place)}
        return needed.isdisjoint(coming) and {*owned, *current}.issuperset(own)

    def modules(self, place: int, owned: Collection[Piece]) -> frozenset[Piece]:
        """The shards that `place` takes over: of copies of these it has no modules."""
        own = self.plan.pieces_of_place(place)
        return frozenset(piece for piece in own if piece.shard != WHOLE and piece not in owned)

    def bases(self, now: Plan) -> frozenset[Piece]:
        """The layers, or shards, for which this plan adds a standby to those of `now`: their owners send it the
        base."""
        return frozenset(piece for piece, _ in new_copies(now, self.plan))


def check_next(plan: Plan, program: RankProgram, now: Plan, place: int) -> None:
    """Check that `place` can follow `plan` after `now` in the same generation. Both may be of other replicas: a step
    has those of its leg of the batch's course.

    Args:
        program: of the place.

    Raises:
        JobError: it takes another generation, or the program is of another plan.
    """
    name = f"plan {plan.epoch}.{plan.version}"
    if plan.key <= now.key:
        raise JobError(f"{name} is not newer than plan {now.epoch}.{now.version}, which is in force")
    for what, new, old in (
        ("ranks in a pipeline", plan.pipeline_ranks, now.pipeline_ranks),
        ("pipelines", plan.pipeline_count, now.pipeline_count),
        ("microbatches", plan.microbatches, now.microbatches),
        ("layers", plan.layers[-1][1], now.layers[-1][1]),
        ("shards of each layer", plan.shards, now.shards),
    ):
        if new != old:
            raise JobError(f"{name} has {new} {what}, the one in force {old}: that takes a new generation")
    if (program.stages, program.ranks) != (plan.stages, plan.pipeline_ranks):
        raise JobError(
            f"{name} has {plan.stages} stages on {plan.pipeline_ranks} ranks, its schedule {program.stages}"
            f" on {program.ranks}"
        )
    try:
        check_shares(plan)
    except PlanError as error:
        raise JobError(f"{name}: {error}") from error
    due = plan.shares[plan.place(place).pipeline] if plan.shares else plan.microbatches
    if program.microbatches != due:
        raise JobError(
            f"{name} has {due} microbatches in the pipeline of place {place}, its schedule"
            f" {program.microbatches}"
        )


def check_buffers(plan: Plan, states: Iterable[LayerState]) -> None:
    """Check that `plan` does not part a replica's microbatches where training changes buffers: they need those one
    after the other.

    Args:
        states: of the layers that a rank owns.

    Raises:
        JobError: the plan divides replicas, now or with fewer pipelines, and a layer has such buffers.
    """
    buffered = [state.name for state in states if state.buffers]
    if plan.shard == "gradients" and buffered:
        raise JobError(
            f'pipeline.shard = "gradients" may have a pipeline change replicas after each microbatch, but training'
            f' changes buffers of {buffered[0]}: use "optimizer", or a layer without running statistics'
        )
    if plan.shares and buffered:
        raise JobError(
            f"plan {plan.epoch}.{plan.version} has shares {list(plan.shares)}, but training changes buffers of"
            f" {buffered[0]}: each replica has to stay in one pipeline"
        )
