"""A rank's training from generation to generation: in each from plan to plan, and between two an interrupted commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from planner.shares import for_replicas
from workers.commit.next_plan import NextPlan
from workers.commit.unfinished import Greeting
from workers.elastic.rank_place import RankPlace
from workers.fault_injection.points import FaultPhase
from workers.memory.shortage import shortage_in
from workers.protocol.orders import CommitOutcome, Generation
from workers.protocol.reports import Outcome, Parted, SwitchReport, WarningReport
from workers.step.equipment import Equipment
from workers.step.generation import GenerationSetup
from workers.step.training import NextLeg, TrainingLoop
from workers.transport.channel import Channel


class RankTraining:
    """The training of one rank.

    Args:
        leave: drops the process group.
    """

    def __init__(self, equipment: Equipment, place: RankPlace, leave: Callable[[], None]) -> None:
        self._equipment = equipment
        self._place = place
        self._leave = leave
        self._newest: TrainingLoop | None = None
        """The newest one, which finishes an undecided commit; None: what it trained is of no use any more."""
        self._short = False
        """Whether it ended for want of memory."""
        self._told: set[str] = set()
        """Layers of which it has said why they are not compiled."""
        self.began = 0
        """The newest step begun."""

    @property
    def undecided(self) -> int | None:
        """The step whose commit it reached without learning the outcome."""
        return None if self._newest is None else self._newest.undecided

    @property
    def torn(self) -> bool:
        """Whether an update broke off half-way, so that the layers are of no step."""
        return self._newest is not None and self._newest.torn

    def run(self, generation: Generation, channel: Channel) -> Outcome | Parted:
        """Train until the last step, a STOP or a REGROUP; see `Rank.train`."""
        self._place.holdings.begin_training()
        self._equipment.followers.begin(generation.number)
        setup = self._setup()
        self._tell_uncompiled(setup)
        self._newest = TrainingLoop(setup, generation, channel, self._place.commit.step)
        try:
            while isinstance(end := self._newest.run(), NextPlan | NextLeg):
                if isinstance(end, NextPlan):
                    setup = self._switch(end, setup, generation, channel)
                else:
                    setup = self._next_leg(end, setup, generation, channel)
            if isinstance(end, Outcome):
                self._equipment.kept.end(done=not end.stopped)
            return end
        except BaseException as error:
            # The neighbours must learn of it at once, and their neighbours from them.
            self._leave()
            self._short = shortage_in(error) is not None
            raise
        finally:
            # Standbys of a plan switch that failed half-way have not been trained with yet.
            self._place.holdings.end_training()
            self._take_over(self._newest)
            self._equipment.kept.pause()

    def finish_commit(self, commit_outcome: CommitOutcome) -> None:
        """Apply or drop the undecided commit."""
        if self._newest is not None:
            self._newest.finish_commit(commit_outcome)
            self._take_over(self._newest)

    def recover(self, *, keep: bool) -> None:
        """The rank takes up another assignment.

        Args:
            keep: whether what it trained may still count.
        """
        if self._newest is not None:
            self._equipment.faults.reach(FaultPhase.RECOVERING, self._place.commit.step)
        if self._short:
            self._short = False
            self._equipment.device.release()
        if not keep:
            self._newest = None

    def forget(self) -> None:
        """The rank has taken up another assignment, and nothing is undecided any more."""
        self._newest = None

    def _setup(self) -> GenerationSetup:
        """Setup with which the rank trains, from its assignment on."""
        place, commit = self._place, self._place.commit
        assignment, holdings, source = place.assignment, place.holdings, place.source
        assert assignment is not None
        assert holdings.standbys is not None
        return GenerationSetup(
            **vars(self._equipment),
            place=assignment.place,
            plan=assignment.plan,
            program=assignment.program,
            layers=holdings.layers,
            standbys=holdings.standbys,
            greeting=Greeting(
                host=self._equipment.host,
                port=holdings.port,
                left=commit.left,
                lacks=holdings.standbys.lacking,
                carried=commit.carried,
                validations=commit.validations,
                keeps=self._equipment.kept.offer(),
            ),
            offer=holdings.offer_bases,
            bring=place.bring_base(),
            build=source.module,
            coming=place.coming.modules,
            withdraw=holdings.withdraw,
            snapshots=holdings.snapshots,
            resumed=assignment.start is not None,
            fetch=source.fetch_copy,
            freeze_plans=place.freeze_plans,
        )

    def _switch(
        self, following: NextPlan, setup: GenerationSetup, generation: Generation, channel: Channel
    ) -> GenerationSetup:
        """Follow another plan from the next step on, in the same generation."""
        before, place = self._newest, self._place
        assert before is not None
        self._take_over(before)
        brought_bytes, brought_s = setup.standbys.brought_bytes, setup.standbys.brought_s
        has = place.switch(following, before.upkeep.modules.taken())
        setup.mailbox.taken_up(following)
        channel.renew()
        setup = replace(
            setup,
            plan=following.plan,
            program=following.program,
            layers=has.layers,
            standbys=has.standbys,
            held=following.held,
            bring=place.bring_base(),
        )
        self._tell_uncompiled(setup)
        self._newest = TrainingLoop(setup, generation, channel, place.commit.step, before)
        # At once: the controller acts on it only when every rank has said so, and then all have passed the commit.
        setup.report(
            SwitchReport(
                step=place.commit.step,
                rank=setup.place,
                epoch=following.plan.epoch,
                version=following.plan.version,
                taken=has.taken,
                given=has.given,
                brought_bytes=brought_bytes,
                brought_s=brought_s,
                stall_s=time.perf_counter() - before.ended_s,
                switched_s=time.time(),
            )
        )
        return setup

    def _next_leg(
        self, following: NextLeg, setup: GenerationSetup, generation: Generation, channel: Channel
    ) -> GenerationSetup:
        """Train with the same plan and other replicas from the next step on."""
        before = self._newest
        assert before is not None
        self._take_over(before)
        setup = replace(setup, plan=for_replicas(setup.plan, following.replicas))
        self._newest = TrainingLoop(setup, generation, channel, self._place.commit.step, before)
        return setup

    def _take_over(self, training: TrainingLoop) -> None:
        """Keep what outlives a generation."""
        commit = self._place.commit
        commit.step, commit.left, commit.carried = training.step, training.left, training.carried
        commit.validations = training.validations
        if training.vector is not None:
            commit.vector = training.vector
        self.began = training.began
        together = self._equipment.config.elastic.salvage != "none" and training.weights_together
        self._place.holdings.siblings_weights_known = together

    def _tell_uncompiled(self, setup: GenerationSetup) -> None:
        """Report which of its layers are not compiled, and why, once."""
        if setup.compiler is None or setup.pipeline != 0:
            return
        names = {setup.definition.names[layer] for layer in setup.layers}
        for name, why in setup.compiler.why_not.items():
            if name in names - self._told:
                self._told.add(name)
                text = f"layer {name} is not compiled: {why}. It computes as without job.compile"
                setup.report(WarningReport(rank=setup.rank, text=text))
