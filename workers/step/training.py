"""A rank's training loop in one generation: window, exchange, commit, update, then what the commit requests.

Between two commits only the buffers of a layer change, and they are restored if the step is not committed. A
rank that reaches a commit and loses the others there keeps what it needs to apply the commit later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from planner.codec import from_json, to_json
from planner.course import Leg
from planner.shards import Piece
from workers.checkpoint.coordination import Checkpointing
from workers.checkpoint.moments import bring_back, release
from workers.commit.commit import CommitDecision, CommitError, CommitRecord, Prepared, decide
from workers.commit.next_plan import NextPlan
from workers.commit.unfinished import Greeting, Unfinished, agree, agreed_carried, agreed_validations
from workers.control.announcements import Announcements
from workers.copies.snapshot_turns import SnapshotTurns
from workers.copies.snapshots import Bring
from workers.fault_injection.points import FaultPhase
from workers.freezing.growing_batch import course_after
from workers.freezing.prefix.rule import CommitSeen
from workers.memory.limit import LimitedMemory
from workers.memory.shortage import RankOutOfMemory, shortage_in
from workers.memory.watch import MemoryWatch
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.goals import PastValidation
from workers.protocol.orders import CommitOutcome, Generation, Request
from workers.protocol.reports import Outcome, Parted, Report, WarningReport
from workers.state.layer_state import digest
from workers.step.between_steps import BetweenSteps
from workers.step.engine import Window
from workers.step.generation import GenerationSetup, make_curvature_probe, make_freezer, make_sink
from workers.step.minibatch import Buffers, Findings, Minibatch
from workers.step.skipped_steps import SkippedSteps
from workers.step.step_reports import memory_low, prefix_report, step_report, step_times, timeline_report
from workers.step.upkeep import Upkeep
from workers.transport.channel import Channel


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
class NextLeg:
    """The next step belongs to another leg of the batch's course than the loop was made for."""

    replicas: int


class TrainingLoop:
    """The loop of one rank, with one plan.

    Args:
        step: steps committed so far.
        before: the loop with the previous plan, or with the same one and other replicas, which trained up to `step` in
            the same generation.
    """

    def __init__(
        self,
        setup: GenerationSetup,
        generation: Generation,
        channel: Channel,
        step: int,
        before: TrainingLoop | None = None,
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
        self.ended_s = 0.0
        """When another plan replaced it, by `time.perf_counter`."""
        config = setup.config
        self._freezer = make_freezer(setup, step)
        self._memory: MemoryWatch | None = None
        if config.adapt.policy != "off" and config.adapt.memory_reserve:
            self._memory = MemoryWatch(setup.device, config.adapt.memory_reserve, self._tell_low)
        admit = None if self._memory is None else self._memory.admit
        self._same_plan = before is not None and before._setup.standbys is setup.standbys
        self.upkeep = (
            before.upkeep
            if before is not None and self._same_plan
            else Upkeep(setup, channel, step, self._warn)
        )
        sink = make_sink(setup, channel, self.upkeep.shipping)
        self._minibatch = Minibatch(setup, self._freezer, channel, sink, admit)
        # Known for certain once the ranks have greeted each other.
        self._carry(setup.greeting.carried or Carried())
        self._announcements = (
            Announcements(setup.report, first=setup.place == 0) if before is None else before._announcements
        )
        self._curvature = make_curvature_probe(
            setup, self._minibatch.counted, lambda report: self._announcements.add(report.step, report)
        )
        self._between = BetweenSteps(
            setup=setup,
            channel=channel,
            minibatch=self._minibatch,
            announcements=self._announcements,
            checkpointing=self._new_checkpointing() if before is None else before._between.checkpointing,
            release=self._release,
            last_step=lambda: self._last_step,
        )
        if setup.observe is not None:
            channel.watch_links()
        if before is not None:
            self._continue(before)

    def _carry(self, carried: Carried) -> None:
        """Have the next step follow `carried`."""
        config = self._setup.config
        self.carried = carried
        """State besides layers that the next step follows."""
        self._course = config.course(carried.legs)
        self._last_step = self._course.last_step(config.job.steps)
        if self._course != self._minibatch.course:
            self._minibatch.follow(self._course)

    @property
    def _following(self) -> NextPlan | NextLeg | None:
        """Plan or leg of the next step, if this loop was made for another one."""
        replicas = self._course.at(self.step + 1).replicas
        return self._next or (NextLeg(replicas) if replicas != self._setup.plan.replicas else None)

    def _tell_checked(self) -> None:
        """Report the layers that were compared with plain autograd in this step."""
        if (checked := self._setup.check.taken(self._setup.rank)) is not None:
            self._setup.report(checked)

    def _continue(self, before: TrainingLoop) -> None:
        """Take over the state that lasts for a generation."""
        self.vector, self._owners = before.vector, before._owners
        self._requests = before._requests
        self._skipped = before._skipped
        self._carry(before.carried)
        self._snapshot_turns = before._snapshot_turns
        if not self._same_plan:
            self._snapshot_turns.follow_another_plan()
        self._between.validated, self._between.best = before._between.validated, before._between.best
        self._between.checkpointing.plan = self._setup.plan

    def _new_checkpointing(self) -> Checkpointing:
        setup = self._setup
        checkpointing = Checkpointing(
            setup.config,
            setup.definition.names,
            setup.plan,
            self._generation,
            setup.report,
            setup.faults,
            setup.greeting.left,
            setup.log_sha256,
        )
        checkpointing.validations = setup.greeting.validations
        return checkpointing

    @property
    def undecided(self) -> int | None:
        """The step whose commit it reached without learning the outcome."""
        return None if self._undecided is None else self._undecided.step

    @property
    def weights_together(self) -> bool:
        """Whether all weights that it computes with are those of `step`, those of siblings' shards included: not where
        an owner holds updates back."""
        return not self.torn and not self._setup.held and self._minibatch.weights.together

    @property
    def validations(self) -> tuple[PastValidation, ...]:
        """The job's validations so far."""
        return self._between.checkpointing.validations

    @property
    def left(self) -> Unfinished:
        """Progress on the commit of `step`, for the next generation."""
        return Unfinished(
            step=self.step,
            requests=self._requests,
            validated=self._between.validated,
            best=self._between.best,
            begun=self._between.checkpointing.begun,
            whole=self._between.checkpointing.whole,
        )

    def run(self) -> Outcome | Parted | NextPlan | NextLeg:
        """Train until the last step, or until a commit carries a STOP, a REGROUP or a switch to another plan, or has
        the batch grow, or the next step train layers that this plan has no backward pass for.

        Returns:
            How training ended; or what to train with next.

        Raises:
            JobError: too many steps in a row were skipped.
            RankOutOfMemory: this rank has not enough memory for the step; its state is that of the last commit.
            ChannelError: a rank is gone. No step is half done: the state is that of the last commit. If the
                outcome of one more commit is unknown, `decide` applies or drops it.
        """
        outcome = None
        try:
            outcome = self._run()
            return outcome
        finally:
            self._setup.reading.stop()
            self._setup.snapshots.wait_copied()
            if not isinstance(outcome, NextLeg):
                self.upkeep.end(torn=self.torn)
                if not isinstance(outcome, NextPlan):
                    self.upkeep.modules.stop()
                    self._between.checkpointing.close(wait=isinstance(outcome, Outcome))
                self._setup.standbys.rest()

    def finish_commit(self, commit_outcome: CommitOutcome) -> None:
        """Apply or drop the undecided commit, and send the reports that this releases."""
        undecided = self._undecided
        if undecided is not None and undecided.step == commit_outcome.step:
            if commit_outcome.vector is None:
                raise CommitError(f"nobody brought the records of commit {undecided.step}")
            decision = self._decide(commit_outcome.vector)
            if not decision.skipped:
                self._minibatch.load_buffers(undecided.buffers)
            took_s = undecided.lost_s - undecided.begun_s
            undecided = replace(undecided, begun_s=time.perf_counter() - took_s)
            self._take_up(undecided, commit_outcome.vector, decision)
        elif undecided is not None:
            self._minibatch.drop()
            for request in undecided.requests:
                self._setup.mailbox.put(request)
        self._undecided = None
        self._announcements.end(self.step, commit_outcome.reported)

    def _run(self) -> Outcome | Parted | NextPlan | NextLeg:
        config = self._setup.config
        self._freezer.meet(self._channel)
        stopped = self._greet()
        while not self._between.over and self.step < self._last_step and not stopped:
            if (following := self._following) is not None:
                if isinstance(following, NextPlan):
                    self.ended_s = time.perf_counter()
                    self.upkeep.hand_over(self.step)
                return following
            if self._thawed:
                self._release_all()
                return Parted(rank=self._setup.rank, step=self.step, thawed=True)
            self._step()
            if self._skipped.too_many:
                self._release_all()
                raise JobError(self._skipped.explain(self.step, self.carried.loss_scale))
            stopped = self._stopped
            if Request.REGROUP in self._requests and not stopped and self.step < self._last_step:
                self._release_all()
                return Parted(rank=self._setup.rank, step=self.step)
            self._between.attend(self.step, self._requests, self.carried)
            if self._between.over:
                break
            if not stopped and self.step < self._last_step:
                self._take_snapshot()
        self._release_all()
        if not stopped and config.job.sample_tokens:
            self._between.sample(self.step)
        if (counts := self._freezer.counts()) is not None:
            self._setup.report(counts)
        error = self._between.checkpointing.finish(self._channel, self._setup.place, self.step)
        return Outcome(
            rank=self._setup.rank,
            step=self.step,
            stopped=stopped,
            reached=self._between.reached,
            plateau=self._between.plateau,
            layer_digests=tuple((state.layer, digest(state)) for state in self._between.whole_layers()),
            checkpoint_error=error,
        )

    @property
    def _thawed(self) -> bool:
        """Whether the next step trains layers that have no backward pass with this plan. All ranks find the same."""
        stages = self._setup.program.frozen_stages
        return bool(stages) and self.carried.prefix.layers < self._setup.plan.layers[stages - 1][1]

    @property
    def _stopped(self) -> bool:
        return Request.STOP in self._requests and self.step < self._last_step

    def _keepers(self) -> list[tuple[str, int]]:
        """Return (host, port) of ranks of other nodes that keep what frozen layers make of samples, or may yet."""
        first, own = self._setup.plan.owners_of(0), self._setup.greeting.host
        return [
            (greeting.host, greeting.port)
            for place, greeting in enumerate(self._owners)
            if greeting.host != own and (greeting.keeps or place in first)
        ]

    def _greet(self) -> bool:
        """Exchange greetings and finish what the previous generation left. Returns whether the job stops
        here."""
        setup = self._setup
        known = self._owners
        if not known:
            told = self._channel.all_gather(to_json(setup.greeting))
            self._owners = [from_json(Greeting, greeting) for greeting in told]
            setup.kept.ask(self._keepers())
            self._carry(agreed_carried(self._owners, self.step))
            self._bring_moments_back()
            if not self.step and self.carried.prefix.layers and setup.place == 0:
                setup.report(prefix_report(setup, self.carried.prefix))
            self._between.checkpointing.validations = agreed_validations(self._owners, self.step)
            if setup.pipeline == 0 or setup.plan.shards > 1:  # those that others fetch from
                setup.offer({piece for greeting in self._owners for piece in greeting.lacks})
        plan = setup.plan
        if not self._same_plan:
            self.upkeep.bring(self._owners, self._sharing)
        if not known and plan.snapshot_every and self.step:
            self._begin_snapshot()
        left = None if known else agree(self._owners, self.step)
        if left is None and self.step and not known and not setup.resumed:
            # Back at a snapshot: a checkpoint of its step may have been under way.
            left = Unfinished(step=self.step, validated=True)
        if left is None and setup.resumed and setup.config.job.patience is not None and not known:
            # A checkpoint that was written in haste may lack the validation after its step, which counts.
            validated = any(each.step == self.step for each in self.validations)
            left = Unfinished(step=self.step, validated=validated, begun=self.step, whole=self.step)
        if left is None or not self.step:
            return False
        self._requests = left.requests - {Request.REGROUP}
        self._between.validated = left.validated
        self._between.attend(self.step, self._requests, self.carried, left)
        return self._stopped

    def _take_snapshot(self) -> None:
        """Begin a snapshot if it is time for one."""
        if self._snapshot_turns.due(self.step, self._setup.plan.snapshot_every):
            self._release()
            self._begin_snapshot()

    def _release(self) -> None:
        """Bring layers whose updates are held back to the newest step, here and at siblings."""
        self.upkeep.release()
        if self._setup.held:  # then all siblings come here, also those that held nothing back themselves
            self._minibatch.weights.changed()

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
        setup.snapshots.capture(step, own, wanted, self.carried, sharing=self._sharing)

    @property
    def _sharing(self) -> int:
        """Ranks on this host."""
        return sum(owner.host == self._setup.greeting.host for owner in self._owners)

    def _release_all(self) -> None:
        """Learn that every rank has passed the newest commit."""
        self._channel.all_gather(b"")
        self._announcements.release(self.step)

    def _step(self) -> None:
        begun_s = time.perf_counter()
        step, faults = self.step + 1, self._setup.faults
        self.began = step
        if self._memory is not None:
            self._memory.begin_step()
        before = self._minibatch.copied_buffers()
        committed = False
        self._freezer.begin(step, self.carried.prefix)
        try:
            scale = 1.0 if self.carried.loss_scale is None else self.carried.loss_scale.value
            # Statistics of freezing go with the gradients, and those of a scaled loss are still to be scaled back.
            early = not self._freezer.on and scale == 1.0
            self.upkeep.shipping.expect(early=early, prefix=self._freezer.prefix)
            with self._limited_memory(step):
                window, buffers = self._minibatch.run(self.step, scale)
            self._tell_checked()
            self._observe(step, window)
            # A finished window proves that every rank of the pipeline has passed the newest commit. Not so
            # with forward-only stages: they may run ahead of those behind them.
            if not self._setup.program.frozen_stages:
                self._announcements.release(self.step)
            if not self._freezer.on:
                self.upkeep.send(step, {}, buffers)
            findings = self._minibatch.findings()
            if self._freezer.on:
                self.upkeep.send(step, self._freezer.newest_energies, buffers)
            parcels, waited = self.upkeep.receive(step)
            if waited is not None:
                self._announcements.add(self.step, waited)
            faults.reach(FaultPhase.BEFORE_COMMIT, step)
            record = self._record(window, findings)
            try:
                vector = tuple(self._channel.all_gather(to_json(record)))
                faults.reach(FaultPhase.IN_COMMIT, step)
                decision = self._decide(vector)
                self._announcements.release(self.step)
            except BaseException:
                after = {**self._minibatch.copied_buffers(), **buffers}
                self._undecided = _Undecided(
                    step, begun_s, window, record.requests, after, parcels, time.perf_counter()
                )
                raise
            self._minibatch.load_buffers(before if decision.skipped else buffers)
            committed = True
            self._take_up(_Undecided(step, begun_s, window, record.requests, {}, parcels), vector, decision)
            self._release_moments()
            if self.carried.prefix.layers != self._freezer.prefix:
                # From here on, other tensors carry a gradient from stage to stage.
                self._channel.renew()
            self._next = None if decision.switch is None else self._ready
        except Exception as error:
            if (shortage := shortage_in(error, self._setup.device)) is not None:
                raise RankOutOfMemory(shortage) from error
            raise
        finally:
            if not committed:
                self._minibatch.load_buffers(before)
                if self._undecided is None:
                    self._minibatch.drop()
        faults.reach(FaultPhase.AFTER_COMMIT, step)

    def _limited_memory(self, step: int) -> AbstractContextManager[object]:
        """The limit that a drill sets to what the window's tensors take."""
        limit_bytes = self._setup.faults.memory_limit_bytes(step) if self._setup.faults.armed else None
        if limit_bytes is None:
            return nullcontext()
        own = [state for _, state in self._setup.layers.values()]
        return LimitedMemory(limit_bytes, [*own, *self.upkeep.states()])

    def _warn(self, text: str) -> None:
        self._setup.report(WarningReport(rank=self._setup.rank, text=text))

    def _tell_low(self, left_bytes: int, reserve_bytes: int) -> None:
        self._setup.report(memory_low(self._setup, self.began, left_bytes, reserve_bytes))

    def _observe(self, step: int, window: Window) -> None:
        setup = self._setup
        if setup.observe is not None:
            frozen = self._freezer.may_freeze(step)
            prefix = self._freezer.prefix
            setup.observe(step_times(setup, self._channel, step, window, frozen, prefix))

    def _record(self, window: Window, findings: Findings) -> CommitRecord:
        setup, freezer = self._setup, self._freezer
        files, seconds, errors = self._between.checkpointing.finished_files()
        return CommitRecord(
            rank=setup.place,
            generation=self._generation.number,
            step=self.step + 1,
            losses=window.losses,
            shares=window.shares,
            samples=self._minibatch.samples if self._minibatch.reads_samples else {},
            **vars(findings),
            busy_s=window.busy_s,
            requests=self._own_requests(),
            prepared=freezer.bring(setup.mailbox.prepared()),
            next_plan=self._ready_plan(),
            bases_done=self.upkeep.bases_done,
            snapshot=setup.snapshots.complete,
            snapshot_given_up=setup.snapshots.given_up,
            files=files,
            files_s=seconds,
            files_errors=errors,
        )

    def _own_requests(self) -> tuple[Request, ...]:
        """Requests to the commit, from the controller and from this rank itself."""
        asked = self._setup.mailbox.drain()
        return (*asked, Request.RESCUE) if self._setup.rescues.due(time.time()) else asked

    def _ready_plan(self) -> Prepared | None:
        """The prepared plan, for the commit record, if this rank could follow it from the next step on."""
        plan = self._setup.mailbox.next_plan()
        self._ready = plan if self.upkeep.ready_for(plan) else None
        return None if self._ready is None else self._ready.key

    def _decide(self, vector: tuple[bytes, ...]) -> CommitDecision:
        """The decision that follows from all ranks' records; changes no layer."""
        records = [from_json(CommitRecord, record) for record in vector]
        self._between.checkpointing.observe(records, self._setup.place)
        leg = self._course.at(self.step + 1)
        return decide(
            records,
            microbatches=self._setup.plan.replicas * self._setup.plan.microbatches,
            layers=len(self._setup.definition.layers),
            clip_norm=self._setup.config.optimizer.clip_norm,
            lr=self._setup.optimizer.lr(self._course.along(self.step)) * leg.lr_factor,
            newest=self._freezer.newest,
            shards=self._setup.plan.shards,
        )

    def _take_up(self, step: _Undecided, vector: tuple[bytes, ...], decision: CommitDecision) -> None:
        """Apply the committed step. Only here do layers change, except for their buffers."""
        self._setup.snapshots.wait_copied()
        self.torn = True
        if not decision.skipped:
            if self._curvature is not None:
                self._curvature.observe(
                    step.step, decision.shares, may_freeze=self._freezer.may_freeze(step.step)
                )
            for index, (layer, state) in self._setup.layers.items():
                if self.upkeep.holds(index):
                    continue
                self._setup.optimizer.update_(state, layer.gradients(), decision.scale, decision.lr)
            self._minibatch.weights.changed(self._minibatch.untouched)
        self.upkeep.hold(step.step, self._freezer.newest_energies, decision)
        reports = self._freezer.commit(decision)
        self.upkeep.apply(step.step, step.parcels, decision, self._freezer.newest)
        self._minibatch.drop()
        self.step, self.vector = step.step, vector
        self._requests, self._between.validated = decision.requests, False
        self.torn = False
        before, leg = self.carried, self._course.at(self.step)
        self._carry(self._carried_after(decision))
        if self.carried.prefix.layers != before.prefix.layers:
            grown = self.carried.legs[-1] if self.carried.legs != before.legs else None
            told = prefix_report(self._setup, self.carried.prefix, decision.step, decision.norms, grown)
            self._announcements.add_shared(self.step, told)
        self._bring_moments_back()
        self._announce(step, leg, decision, reports)
        if decision.bases_done:
            self._setup.withdraw()

    def _bring_moments_back(self) -> None:
        """Before the next step, and before a checkpoint that no longer names their files: have the moments in memory of
        the layers that it trains, and of those that begin other statistics."""
        setup, prefix = self._setup, self.carried.prefix.layers
        bring_back((state for _, state in setup.layers.values()), prefix)
        setup.snapshots.hold_moments(0 if self._freezer.changes_method else prefix)

    def _release_moments(self) -> None:
        """Let go of the moments that only a complete checkpoint has to have: those of frozen layers."""
        files = self._between.checkpointing.shared_moments()
        if not files:
            return
        tied = {layer for group in self._setup.definition.tied_layers for layer in group}
        frozen = {*range(self.carried.prefix.layers)} - tied
        release((state for layer, (_, state) in self._setup.layers.items() if layer in frozen), files)

    def _carried_after(self, decision: CommitDecision) -> Carried:
        """State that the step after `decision` follows."""
        scale, prefix = self.carried.loss_scale, self.carried.prefix
        if scale is not None:
            scale = scale.after(skipped=decision.skipped and decision.targets)
        optimizer, past, course = self._setup.optimizer, self.validations, self._course
        began, along = (course.along(steps) for steps in (decision.step - 1, decision.step))
        warm = along >= optimizer.config.warmup_steps
        seen = CommitSeen(
            step=decision.step,
            began=began,
            along=along,
            norms=decision.estimated_norms if self._freezer.masks else decision.norms,
            skipped=decision.skipped,
            rate=optimizer.lr(along) / optimizer.config.lr if warm else 1.0,
            validations=[(each.step, each.values["loss"]) for each in past if each.step < decision.step],
        )
        following = self._freezer.prefix_after(prefix, seen)
        if following.layers != prefix.layers:
            layers = len(self._setup.definition.layers)
            freeze = self._setup.config.freeze
            course = course_after(course, freeze, decision.step + 1, layers, following.layers)
        return Carried(loss_scale=scale, prefix=following, legs=course.further)

    def _announce(
        self, step: _Undecided, leg: Leg, decision: CommitDecision, freezing: Iterable[Report]
    ) -> None:
        """Have the reports of the committed step sent once all ranks have passed its commit."""
        setup, step_s = self._setup, time.perf_counter() - step.begun_s
        self._announcements.add_shared(
            self.step, step_report(setup, leg, self._generation.number, decision, step_s)
        )
        reports = [*freezing]
        warning = self._skipped.count(decision, self.carried.loss_scale)
        if warning is not None and setup.place == 0:
            reports.append(WarningReport(rank=setup.rank, text=warning))
        last = self._stopped or self.step == self._last_step
        asked = setup.config.job.timeline_every and self.step % setup.config.job.timeline_every == 0
        if last or asked or self._freezer.timed(self.step):
            tells = setup.place == 0 and self._freezer.tells_energies(self.step)
            norms = decision.norms if tells and not decision.skipped else ()
            reports.append(timeline_report(setup, self.step, step.window, step_s, norms))
        reports += self.upkeep.news(self.step)
        reports += self._snapshot_turns.commit(
            self.step, setup.plan.snapshot_every, decision.snapshot, decision.snapshot_given_up
        )
        for report in reports:
            self._announcements.add(self.step, report)
