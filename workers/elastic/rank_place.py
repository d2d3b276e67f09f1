"""The place that a rank has in its job's plan, from assignment to assignment, and the layers and copies that it takes
up for it. Knows no training and no channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from planner.shards import Piece
from workers.checkpoint.folder import DamagedCheckpointError, read_carried, read_manifest
from workers.commit.last_commit import LastCommit
from workers.commit.next_plan import NextPlan, check_buffers
from workers.commit.unfinished import Greeting
from workers.config import WorkerConfig
from workers.copies.host_copies import HostForm
from workers.copies.standby import Base, Standbys
from workers.elastic.assembly import assemble
from workers.elastic.coming_place import ComingPlace
from workers.elastic.holdings import Holdings
from workers.elastic.layer_source import LayerSource
from workers.elastic.switch import Switched, take_up
from workers.freezing.plans import FreezePlans, FreezeSettings, check_plan
from workers.freezing.prefix.rules import first_prefix
from workers.layers.layer import Layer
from workers.protocol.carried import Carried
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.goals import PastValidation
from workers.protocol.loss_scale import LossScale
from workers.protocol.orders import Assignment
from workers.state.optim import Optimizer
from workers.state.precision import scales_loss


@dataclass(kw_only=True, eq=False)
class RankPlace:
    """The place of one rank, over all generations."""

    config: WorkerConfig
    optimizer: Optimizer
    commit: LastCommit
    """The newest that the rank has."""
    holdings: Holdings
    source: LayerSource
    coming: ComingPlace
    """Its next place, for which it gets things ready."""
    host_form: HostForm | None
    """Settings of its copies in host memory; None: it keeps them on its device."""
    freeze_plans: FreezePlans = field(default_factory=FreezePlans)
    """Freeze plans whose start is known; training adds those that are adopted."""
    assignment: Assignment | None = None
    """The one that it follows, with the newest plan."""

    def begin(self, assignment: Assignment) -> None:
        """Begin an attempt to follow `assignment`: from here on the source can be stopped."""
        plan = assignment.plan
        self.source.begin(
            FreezeSettings(self.config.freeze, FreezePlans(assignment.freeze)),
            plan.shard_of_place(assignment.place),
            self.coming.modules.taken(),
            plan.layers_of_place(assignment.place),
        )
        self.holdings.snapshots.forget_after(-1 if assignment.fresh else assignment.step)

    def leaves_step(self, assignment: Assignment) -> bool:
        """Whether what the rank holds is of no use for `assignment`."""
        return assignment.start is not None or assignment.step != self.commit.step

    def accept(self, assignment: Assignment) -> DamagedCheckpoint | None:
        """Take up the layers and copies that `assignment` gives the rank; see `Rank.follow`. Call `begin` before."""
        plan, step, plans, holdings = (
            assignment.plan,
            assignment.step,
            FreezePlans(assignment.freeze),
            self.holdings,
        )
        if self.leaves_step(assignment):
            holdings.clear()
        for known in assignment.freeze:
            check_plan(known, self.config.freeze, plan.layers[-1][1], self.config.microbatches)
        copied = self.coming.copies_for(assignment)
        try:
            has = assemble(assignment, holdings, copied, self.source, self.host_form)
            carried = self._carried_at(assignment)
            validations = self._validations_at(assignment)
        except DamagedCheckpointError as error:
            return error.damage
        self.source.end()
        check_buffers(plan, (state for _, state in has.layers.values()))
        standbys = Standbys(
            plan.copies_at(assignment.place),
            has.bases,
            freeze=FreezeSettings(self.config.freeze, plans),
            optimizer=self.optimizer,
            step=step,
            host=self.host_form,
            known=has.on_host,
        )
        holdings.take_up(
            has.layers, standbys, {**has.spare, **has.bases}, has.on_host, has.salvaged, has.mixed
        )
        if not step or self.leaves_step(assignment):
            self.commit.move_to(step, carried)
            self.commit.validations = validations
        self.freeze_plans = plans
        self.assignment = assignment
        return None

    def switch(self, following: NextPlan, modules: Mapping[Piece, Layer]) -> Switched:
        """Take up what the rank has under another plan of the same generation, for which it is ready.

        Args:
            modules: of the shards that it takes over.
        """
        assignment, holdings = self.assignment, self.holdings
        assert assignment is not None
        assert holdings.standbys is not None
        plan, before = following.plan, assignment.plan
        has = take_up(
            plan,
            assignment.place,
            holdings.layers,
            holdings.standbys,
            modules,
            freeze=FreezeSettings(self.config.freeze, self.freeze_plans),
            optimizer=self.optimizer,
            step=self.commit.step,
        )
        holdings.switch(has.layers, has.standbys)
        self.assignment = replace(assignment, plan=plan, program=following.program)
        if plan.place(assignment.place).pipeline == 0 or plan.shards > 1:  # those that others fetch from
            holdings.offer_bases(following.bases(before))
        return has

    def bring_base(self) -> Callable[[Piece, Greeting, threading.Event], Base]:
        """Fetches the base of a copy at the newest commit, from the owner with this greeting."""
        return partial(self.source.fetch_base, self.commit.step, on_host=self.host_form is not None)

    def _carried_at(self, assignment: Assignment) -> Carried | None:
        """State that the step after the assignment's follows, where that is known.

        Raises:
            DamagedCheckpointError: the checkpoint to start from has no loss scale, and the precision needs one.
        """
        if assignment.start is not None:
            return read_carried(assignment.start, self.config.job.precision)
        if assignment.step == 0:
            config = self.config
            return Carried(
                loss_scale=LossScale() if scales_loss(config.job.precision) else None,
                prefix=first_prefix(config.freeze, assignment.plan.layers[-1][1]),
            )
        return assignment.carried or self.holdings.carried(assignment.step)

    def _validations_at(self, assignment: Assignment) -> tuple[PastValidation, ...]:
        """The job's validations up to the assignment's step, as far as this rank knows them.

        Raises:
            DamagedCheckpointError: the checkpoint to start from cannot be read.
        """
        if assignment.start is not None:
            return read_manifest(assignment.start).validations
        return tuple(each for each in self.commit.validations if each.step <= assignment.step)
