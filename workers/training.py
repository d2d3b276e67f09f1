"""A rank's training loop in one generation: window, exchange, commit, update, then what the commit requests.

Between two commits only the buffers of a layer change, and they are restored if the step is not committed. A
rank that reaches a commit and loses the others there keeps what it needs to apply the commit later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from planner.observed import StepTimes
from planner.shards import Piece
from workers.checkpoint.coordination import Checkpointing
from workers.commit import CommitError, CommitRecord, Decision, Prepared, settle
from workers.control.announcements import Announcements
from workers.control.next_plan import NextPlan
from workers.data.sampling import samples_digest
from workers.elastic.followed import Followed
from workers.elastic.held_updates import HeldUpdates
from workers.elastic.modules_ahead import ModulesAhead
from workers.elastic.redundancy import Shipping
from workers.elastic.snapshot_turns import SnapshotTurns
from workers.elastic.snapshots import Bring
from workers.elastic.standby_watch import StandbyWatch
from workers.engine import Window
from workers.fault_injection.points import Phase
from workers.freezing.checks import Found
from workers.freezing.energy import Energy, total_of
from workers.generation import GenerationSetup, make_freezer
from workers.gradients.curvature import CurvatureProbe
from workers.memory.limit import LimitedMemory
from workers.memory.shortage import OutOfMemory, shortage_in
from workers.memory.watch import MemoryWatch
from workers.minibatch import Buffers, Minibatch
from workers.profiling.stage_times import half_times, stage_times
from workers.protocol import (
    Generation,
    JobError,
    MemoryLow,
    Outcome,
    Parted,
    Request,
    SampleReport,
    Settlement,
    StepReport,
    TimelineReport,
    ValidationReport,
    WarningReport,
)
from workers.sample_text import sample_text
from workers.skipped_steps import SkippedSteps
from workers.state.layer_state import LayerState, digest, host_copy
from workers.state.precision import scales_loss
from workers.transport.channel import Channel
from workers.unfinished import Greeting, Unfinished, agree
from workers.validation import SAMPLING, validate


@dataclass(frozen=True)
class _Undecided:
    """A step whose commit this rank reached without learning the outcome; its gradients are in the
    parameters."""

    step: int
    begun_s: float
    """Start, by `time.perf_counter`."""
    window: Window
    requests: tuple[Request, ...]
    """Requests from its mailbox."""
    buffers: Buffers
    """The buffers' values if the step is committed."""
    parcels: Mapping[Piece, Tensor]
    """Packed gradients of what it keeps standbys of."""
    lost_s: float = 0.0
    """When it lost the other ranks, on the same clock."""


@dataclass(frozen=True)
class _Findings:
    """Statistics of the step's gradients, by layer; see `CommitRecord`."""

    squared_norms: dict[int, float]
    parameter_norms: dict[int, dict[str, float]]
    checked: Found
    settled: dict[int, int]
    energies: dict[int, dict[str, Energy]]

    @property
    def layer_energies(self) -> dict[int, Energy]:
        return {layer: total_of(of_layer.values()) for layer, of_layer in self.energies.items()}


class Training:
    """The loop of one rank, with one plan.

    Args:
        step: steps committed so far.
        before: the loop with the previous plan, which trained up to `step` in the same generation.
    """

    def __init__(
        self,
        setup: GenerationSetup,
        generation: Generation,
        channel: Channel,
        step: int,
        before: Training | None = None,
    ) -> None:
        self._setup = setup
        self._generation = generation
        self._channel = channel
        self.step = step
        self.vector: tuple[bytes, ...] | None = None
        """All ranks' records of the commit of `step`, once there has been one in this generation."""
        self.torn = False
        """Whether an update broke off half-way, so that the layers are of no step."""
        self.began = step
        """The newest step begun."""
        self._requests: frozenset[Request] = frozenset()
        self._validated = False
        self._skipped = SkippedSteps(setup.config.optimizer.max_skipped_steps)
        self._undecided: _Undecided | None = None
        self._ready: NextPlan | None = None
        """The plan that it was ready for at the newest commit."""
        self._next: NextPlan | None = None
        """The plan that all ranks follow after the newest commit."""
        self._owners: list[Greeting] = []
        """Every rank's greeting, by place."""
        self._snapshot_turns = SnapshotTurns(
            setup.snapshots, setup.rank, setup.place, setup.config.elastic.undone_steps
        )
        self.loss_scale = setup.greeting.loss_scale
        """Of the next step, where the precision needs one. Known once the ranks have greeted each other."""
        self.ended_s = 0.0
        """When another plan replaced it, by `time.perf_counter`."""
        config, plan = setup.config, setup.plan
        self._freezer = make_freezer(setup, step)
        self._memory: MemoryWatch | None = None
        if config.adapt.policy != "off" and config.adapt.memory_reserve:
            self._memory = MemoryWatch(setup.device, config.adapt.memory_reserve, self._tell_low)
        admit = None if self._memory is None else self._memory.admit
        self._minibatch = Minibatch(setup, self._freezer, channel, admit)
        self._standbys = setup.standbys
        self._shipping = Shipping(
            channel,
            plan,
            setup.place,
            setup.layers,
            self._minibatch.free_tags,
            setup.held,
            on_host=self._standbys.host is not None,
        )
        self._began = step
        self._owned = frozenset(plan.pieces_of_place(setup.place))
        to_go = {piece.layer for piece, _ in setup.held if piece in self._owned}
        self._held_updates = HeldUpdates({layer: setup.layers[layer] for layer in to_go}, setup.optimizer)
        self._followed = Followed(setup.followers, setup.layers, to_go)
        self._watch = StandbyWatch(self._standbys, setup.rank, setup.place)
        self.modules = ModulesAhead(setup.build, self._warn)
        """Of the shards that it takes over with the next plan."""
        self._total = plan.replicas * plan.microbatches
        self._announcements = Announcements(setup.report, first=setup.place == 0)
        self._curvature = None
        if config.curvature_every and (setup.pipeline == 0 or plan.shards > 1):
            states = {layer: state for layer, (_, state) in setup.layers.items()}
            sampled = {
                place: parameter
                for place, parameter in self._minibatch.counted.items()
                if place[1] in states[place[0]].updates
            }
            self._curvature = CurvatureProbe(
                config.curvature_every,
                setup.place,
                self._total,
                sampled,
                {(layer, name): states[layer].weights[name] for layer, name in sampled},
                lambda report: self._announcements.add(report.step, report),
            )
        self._checkpointing = Checkpointing(
            config,
            setup.definition.names,
            plan,
            generation,
            setup.report,
            setup.faults,
            setup.greeting.left,
        )
        if setup.observe is not None:
            channel.watch_links()
        if before is not None:
            self._continue(before)

    def _continue(self, before: Training) -> None:
        """Take over the state that lasts for a generation."""
        self.vector, self._owners = before.vector, before._owners
        self._requests, self._validated = before._requests, before._validated
        self._skipped, self.loss_scale = before._skipped, before.loss_scale
        self._snapshot_turns = before._snapshot_turns
        self._snapshot_turns.follow_another_plan()
        self._announcements, self._checkpointing = before._announcements, before._checkpointing
        self._checkpointing.plan = self._setup.plan

    @property
    def undecided(self) -> int | None:
        """The step whose commit it reached without learning the outcome."""
        return None if self._undecided is None else self._undecided.step

    @property
    def left(self) -> Unfinished:
        """What is done of the commit of `step`, for the next generation."""
        return Unfinished(
            step=self.step,
            requests=self._requests,
            validated=self._validated,
            begun=self._checkpointing.begun,
            whole=self._checkpointing.whole,
        )

    def run(self) -> Outcome | Parted | NextPlan:
        """Train until the last step, or until a commit carries a STOP, a REGROUP or a switch to another plan.

        Returns:
            How training ended; or the plan to train with next.

        Raises:
            JobError: too many steps in a row were skipped.
            OutOfMemory: this rank has not enough memory for the step; its state is that of the last commit.
            ChannelError: a rank is gone. No step is half done: the state is that of the last commit. If the
                outcome of one more commit is unknown, `settle` applies or drops it.
        """
        outcome = None
        try:
            outcome = self._run()
            return outcome
        finally:
            self._setup.reading.stop()
            self._setup.snapshots.wait_copied()
            if not self.torn:
                self._held_updates.end()
            if not isinstance(outcome, NextPlan):
                self.modules.stop()
                self._checkpointing.close(wait=isinstance(outcome, Outcome))
            self._standbys.rest()

    def settle(self, settlement: Settlement) -> None:
        """Apply or drop the undecided commit, and send the reports that this settles."""
        undecided = self._undecided
        if undecided is not None and undecided.step == settlement.step:
            if settlement.vector is None:
                raise CommitError(f"nobody brought the records of commit {undecided.step}")
            decision = self._decide(settlement.vector)
            if not decision.skipped:
                self._minibatch.load_buffers(undecided.buffers)
            took_s = undecided.lost_s - undecided.begun_s
            undecided = replace(undecided, begun_s=time.perf_counter() - took_s)
            self._take_up(undecided, settlement.vector, decision)
        elif undecided is not None:
            self._minibatch.drop()
            for request in undecided.requests:
                self._setup.mailbox.put(request)
        self._undecided = None
        self._announcements.end(self.step, settlement.reported)

    def _run(self) -> Outcome | Parted | NextPlan:
        config = self._setup.config
        self._freezer.meet(self._channel)
        stopped = self._greet()
        while self.step < config.steps and not stopped:
            self._step()
            if self._skipped.too_many:
                self._settle_all()
                raise JobError(self._skipped.explain(self.step, self.loss_scale))
            stopped = self._stopped
            if Request.REGROUP in self._requests and not stopped and self.step < config.steps:
                self._settle_all()
                return Parted(rank=self._setup.rank, step=self.step)
            self._attend()
            if not stopped and self.step < config.steps:
                self._take_snapshot()
            if self._next is not None and not stopped and self.step < config.steps:
                self.ended_s = time.perf_counter()
                self._flush_held()
                return self._next
        self._settle_all()
        if not stopped and config.sample_tokens:
            self._sample()
        if (counts := self._freezer.counts()) is not None:
            self._setup.report(counts)
        error = self._checkpointing.finish(self._channel, self._setup.place, self.step)
        return Outcome(
            rank=self._setup.rank,
            step=self.step,
            stopped=stopped,
            layer_digests=tuple((state.layer, digest(state)) for state in self._whole_layers()),
            checkpoint_error=error,
        )

    @property
    def _stopped(self) -> bool:
        return Request.STOP in self._requests and self.step < self._setup.config.steps

    def _greet(self) -> bool:
        """Exchange greetings and finish what the previous generation left. Returns whether the job stops
        here."""
        setup = self._setup
        known = self._owners
        if not known:
            told = self._channel.all_gather(setup.greeting.encode())
            self._owners = [Greeting.decode(greeting) for greeting in told]
            self._agree_on_scale()
            if setup.pipeline == 0 or setup.plan.shards > 1:  # those that others fetch from
                setup.offer({piece for greeting in self._owners for piece in greeting.lacks})
        plan = setup.plan
        if self._standbys.host is not None:
            self._standbys.host.sharing = self._sharing
        self._standbys.bring(
            lambda piece, stopped: setup.bring(piece, self._owners[plan.owner_of(piece)], stopped)
        )
        if not known and plan.snapshot_every and self.step:
            self._begin_snapshot()
        left = None if known else agree(self._owners, self.step)
        if left is None and self.step and not known and not setup.resumed:
            # Back at a snapshot: a checkpoint of its step may have been under way.
            left = Unfinished(step=self.step, validated=True)
        if left is None or not self.step:
            return False
        self._requests = left.requests - {Request.REGROUP}
        self._validated = left.validated
        self._attend(left)
        return self._stopped

    def _agree_on_scale(self) -> None:
        """Take the loss scale from a rank that knows it: from the newest commit, or from the checkpoint."""
        if not scales_loss(self._setup.config.precision):
            return
        known = {owner.loss_scale for owner in self._owners if owner.loss_scale is not None}
        if not known:
            raise JobError(
                f"no rank that is left knows the loss scale after step {self.step}: resume from the newest checkpoint,"
                " which holds it"
            )
        assert len(known) == 1, f"ranks differ in the loss scale after step {self.step}: {known}"
        (self.loss_scale,) = known

    def _attend(self, left: Unfinished | None = None) -> None:
        """Do what the newest commit requests.

        Args:
            left: what is known of that commit, if it was in an earlier generation.
        """
        config = self._setup.config
        last = self._stopped or self.step == config.steps
        every = config.checkpoint.every_steps
        due = last or (every and self.step % every == 0) or Request.CHECKPOINT in self._requests
        if left is not None:
            due = (due and left.whole < self.step) or left.begun > left.whole
        if due:
            self._held_updates.release()
            self._checkpoint()
        every = config.validate_every
        if not self._validated and ((every and self.step % every == 0) or self.step == config.steps):
            self._held_updates.release()
            self._validate()

    def _take_snapshot(self) -> None:
        """Begin a snapshot if it is time for one."""
        if self._snapshot_turns.due(self.step, self._setup.plan.snapshot_every):
            self._held_updates.release()
            self._begin_snapshot()

    def _begin_snapshot(self) -> None:
        """Begin to copy what this rank owns as it is now, and to fetch what it keeps for others."""
        setup, step = self._setup, self.step
        plan = setup.plan
        self._snapshot_turns.begin(step)
        own = [setup.layers[layer][1] for layer in sorted(setup.layers)]

        def bring(piece: Piece) -> Bring:
            owner = self._owners[plan.owner_of(piece)]
            return lambda stopped: setup.fetch(piece, step, owner, stopped)

        wanted = {piece: bring(piece) for piece in plan.snapshots_at(setup.place)}
        setup.snapshots.take(step, own, wanted, self.loss_scale, sharing=self._sharing)

    @property
    def _sharing(self) -> int:
        """Ranks on this host."""
        return sum(owner.host == self._setup.greeting.host for owner in self._owners)

    def _flush_held(self) -> None:
        """Send the gradients of held-back layers to the layers' destinations."""
        if self._setup.held:
            got = self._shipping.flush_held(self._held_updates.parcels, self.step - self._began)
            for piece, parcels in got.items():
                self._standbys.supply(piece, parcels)

    def _settle_all(self) -> None:
        """Learn that every rank has passed the newest commit."""
        self._channel.all_gather(b"")
        self._announcements.settle(self.step)

    def _step(self) -> None:
        begun_s = time.perf_counter()
        step, faults = self.step + 1, self._setup.faults
        self.began = step
        if self._memory is not None:
            self._memory.begin_step()
        before = self._minibatch.copied_buffers()
        committed = False
        self._freezer.begin(step)
        try:
            self._shipping.expect()
            with self._limited_memory(step):
                scale = 1.0 if self.loss_scale is None else self.loss_scale.value
                # Statistics of freezing go with the gradients.
                final = None if self._freezer.on else self._shipping
                window, buffers = self._minibatch.run(self.step, scale, final)
            self._observe(step, window)
            # A finished window proves that every rank of the pipeline has passed the newest commit. Not so
            # with forward-only stages: they may run ahead of those behind them.
            if not self._setup.program.frozen_stages:
                self._announcements.settle(self.step)
            if not self._freezer.on:
                self._send_parcels(step, {}, buffers)
            findings = self._look()
            if self._freezer.on:
                self._send_parcels(step, self._freezer.newest_energies, buffers)
            parcels = self._shipping.receive()
            if (waited := self._watch.let_come(step)) is not None:
                self._announcements.add(self.step, waited)
            faults.reach(Phase.BEFORE_COMMIT, step)
            record = self._record(window, findings)
            try:
                vector = tuple(self._channel.all_gather(record.encode()))
                faults.reach(Phase.IN_COMMIT, step)
                decision = self._decide(vector)
                self._announcements.settle(self.step)
            except BaseException:
                after = {**self._minibatch.copied_buffers(), **buffers}
                self._undecided = _Undecided(
                    step, begun_s, window, record.requests, after, parcels, time.perf_counter()
                )
                raise
            self._minibatch.load_buffers(before if decision.skipped else buffers)
            committed = True
            self._take_up(_Undecided(step, begun_s, window, record.requests, {}, parcels), vector, decision)
            self._next = None if decision.switch is None else self._ready
        except Exception as error:
            if (shortage := shortage_in(error, self._setup.device)) is not None:
                raise OutOfMemory(shortage) from error
            raise
        finally:
            if not committed:
                self._minibatch.load_buffers(before)
                if self._undecided is None:
                    self._minibatch.drop()
        faults.reach(Phase.AFTER_COMMIT, step)

    def _send_parcels(self, step: int, energies: Mapping[int, Sequence[float]], buffers: Buffers) -> None:
        self._followed.send(step, self._shipping.send(energies, buffers), energies)

    def _limited_memory(self, step: int) -> AbstractContextManager[object]:
        """The limit that a drill sets to what the window's tensors take."""
        limit_bytes = self._setup.faults.memory_limit_bytes(step) if self._setup.faults.armed else None
        if limit_bytes is None:
            return nullcontext()
        own = [state for _, state in self._setup.layers.values()]
        return LimitedMemory(limit_bytes, [*own, *self._standbys.states()])

    def _warn(self, text: str) -> None:
        self._setup.report(WarningReport(rank=self._setup.rank, text=text))

    def _tell_low(self, left_bytes: int, reserve_bytes: int) -> None:
        setup = self._setup
        setup.report(
            MemoryLow(
                rank=setup.rank,
                place=setup.place,
                plan=setup.plan.key,
                step=self.began,
                left_bytes=left_bytes,
                reserve_bytes=reserve_bytes,
                seen_s=time.time(),
            )
        )

    def _observe(self, step: int, window: Window) -> None:
        setup = self._setup
        if setup.observe is not None:
            observed = StepTimes(
                rank=setup.rank,
                place=setup.place,
                step=step,
                plan=setup.plan.key,
                times=stage_times(window.spans),
                halves=half_times(window.spans),
                surroundings=setup.surroundings(),
                frozen=self._freezer.may_freeze(step),
                links=self._channel.link_times(),
                waited_s=window.waited_s,
            )
            setup.observe(observed)

    def _look(self) -> _Findings:
        """Compute the statistics of the step's gradients, which are final."""
        norms = self._minibatch.norms()
        of_layers = dict.fromkeys(self._setup.layers, 0.0)
        of_parameters: dict[int, dict[str, float]] = {layer: {} for layer in self._setup.layers}
        for (layer, name), norm in norms.items():
            of_layers[layer] += norm
            of_parameters[layer][name] = norm
        checked, settled = self._freezer.check()
        return _Findings(of_layers, of_parameters, checked, settled, self._freezer.energies(norms))

    def _record(self, window: Window, findings: _Findings) -> CommitRecord:
        setup, freezer = self._setup, self._freezer
        files, errors = self._checkpointing.finished_files()
        shared = setup.plan.shards > 1
        tells = shared or setup.pipeline == 0
        return CommitRecord(
            rank=setup.place,
            generation=self._generation.number,
            step=self.step + 1,
            losses=window.losses,
            samples=self._minibatch.samples if self._minibatch.reads_samples else {},
            squared_norms=findings.squared_norms if tells and not shared else {},
            parameter_norms=findings.parameter_norms if shared else {},
            scores=findings.checked.scores if tells else {},
            moves=findings.checked.moves if tells else {},
            settled=findings.settled if tells else {},
            energies=findings.layer_energies if tells and not shared else {},
            parameter_energies=findings.energies if shared else {},
            busy_s=window.busy_s,
            requests=setup.mailbox.take(),
            prepared=freezer.bring(setup.mailbox.prepared()),
            next_plan=self._ready_plan(),
            bases_settled=self._standbys.settled,
            snapshot=setup.snapshots.complete,
            snapshot_given_up=setup.snapshots.given_up,
            files=files,
            files_errors=errors,
        )

    def _ready_plan(self) -> Prepared | None:
        """The prepared plan, for the commit record, if this rank could follow it from the next step on."""
        plan, standbys, place = self._setup.mailbox.next_plan(), self._standbys, self._setup.place
        self._ready = None
        if plan is not None:
            standbys.raise_to_device(plan.plan.pieces_of_place(place))
            coming = {*standbys.pieces} - standbys.up_to_date - {*standbys.given_up}
            built = self.modules.ready(plan.modules(place, self._owned))
            self._ready = plan if built and plan.ready(place, self._owned, standbys.live, coming) else None
        return None if self._ready is None else self._ready.key

    def _decide(self, vector: tuple[bytes, ...]) -> Decision:
        """The decision that follows from all ranks' records; changes no layer."""
        records = [CommitRecord.decode(record) for record in vector]
        self._checkpointing.observe(records, self._setup.place)
        return settle(
            records,
            microbatches=self._total,
            layers=len(self._setup.definition.layers),
            clip_norm=self._setup.config.optimizer.clip_norm,
            newest=self._freezer.newest,
            shards=self._setup.plan.shards,
        )

    def _take_up(self, step: _Undecided, vector: tuple[bytes, ...], decision: Decision) -> None:
        """Apply the committed step. Only here do layers change, except for their buffers."""
        self._setup.snapshots.wait_copied()
        self.torn = True
        if not decision.skipped:
            if self._curvature is not None:
                self._curvature.observe(step.step, may_freeze=self._freezer.may_freeze(step.step))
            for index, (layer, state) in self._setup.layers.items():
                if self._held_updates.holds(index):
                    continue
                self._setup.optimizer.update_(state, layer.gradients(), decision.scale, self.step)
            self._minibatch.weights.changed()
        self._held_updates.hold(step.step, self._freezer.newest_energies, decision)
        reports = self._freezer.commit(decision)
        self._standbys.apply(step.step, step.parcels, decision)
        self._followed.commit(decision, self._freezer.newest)
        self._minibatch.drop()
        self.step, self.vector = step.step, vector
        self._requests, self._validated = decision.requests, False
        self.torn = False
        step_s = time.perf_counter() - step.begun_s
        self._announcements.add_shared(self.step, self._step_report(decision, step_s))
        for report in reports:
            self._announcements.add(self.step, report)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(skipped=decision.skipped)
        warning = self._skipped.count(decision, self.loss_scale)
        if warning is not None and self._setup.place == 0:
            self._announcements.add(self.step, WarningReport(rank=self._setup.rank, text=warning))
        config = self._setup.config
        last = self._stopped or self.step == config.steps
        asked = config.timeline_every and self.step % config.timeline_every == 0
        if last or asked or self._freezer.monitoring(self.step):
            timeline = TimelineReport(
                step=self.step,
                rank=self._setup.place,
                step_s=step_s,
                spans=step.window.spans,
                memory_bytes=self._setup.device.memory_bytes(),
            )
            self._announcements.add(self.step, timeline)
        for report in self._watch.news(self.step):
            self._announcements.add(self.step, report)
        if decision.bases_settled:
            self._setup.withdraw()
        every = self._setup.plan.snapshot_every
        for report in self._snapshot_turns.commit(
            self.step, every, decision.snapshot, decision.snapshot_given_up
        ):
            self._announcements.add(self.step, report)

    def _step_report(self, decision: Decision, step_s: float) -> StepReport:
        config = self._setup.config
        samples = self._total * config.microbatch_size
        return StepReport(
            generation=self._generation.number,
            step=decision.step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=self._setup.optimizer.lr(decision.step - 1),
            samples=samples,
            tokens=samples * self._setup.data.tokens_per_sample,
            step_s=step_s,
            bubble=max(0.0, 1.0 - decision.busy_s / step_s),
            skipped=decision.skipped,
            gradient_energy=decision.gradient_energy,
            effective_update=decision.effective_update,
            committed_s=time.time(),
            samples_digest=samples_digest(decision.samples),
        )

    def _checkpoint(self) -> None:
        setup = self._setup

        def copies() -> list[LayerState]:
            if setup.plan.shards > 1:
                return self._minibatch.shards.collect(moments=True)
            return [host_copy(state) for _, state in setup.layers.values()] if setup.pipeline == 0 else []

        self._checkpointing.start(self.step, copies, self.loss_scale)

    def _whole_layers(self) -> list[LayerState]:
        """The layers that this rank tells the digests of, with weights and buffers at least."""
        if self._setup.plan.shards > 1:
            return self._minibatch.shards.collect(moments=False)
        return [state for _, (_, state) in sorted(self._setup.layers.items())]

    def _validate(self) -> None:
        self._minibatch.weights.bring()
        loss = validate(self._setup, self._minibatch.engine, self._channel)
        self._validated = True
        if loss is not None:
            self._announcements.settle(self.step)
            self._announcements.add_shared(self.step, ValidationReport(step=self.step, loss=loss))
            self._announcements.settle(self.step)

    def _sample(self) -> None:
        setup = self._setup
        if not setup.definition.language or setup.data.tokenizer is None:
            return
        self._minibatch.weights.bring()
        prompt, text = sample_text(
            self._minibatch.engine,
            self._channel,
            setup.data,
            context=setup.config.model.context,
            tokens=setup.config.sample_tokens,
            seed=setup.config.seed,
            purpose=SAMPLING,
        )
        if setup.place == 0:
            setup.report(SampleReport(step=self.step, prompt=prompt, text=text))
