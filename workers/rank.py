"""One rank, from configuration to outcome. No Ray here: it runs in an actor, a process or a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from planner.arrivals import Arrivals
from planner.features import Sample
from planner.freezing import FreezePlan
from planner.observed import StepTimes
from planner.plan import Plan
from planner.rank_program import RankProgram
from planner.shards import Piece
from workers.checkpoint.coordination import seal
from workers.checkpoint.corruption import corrupt_newest_checkpoint
from workers.checkpoint.folder import DamagedCheckpointError, read_loss_scale
from workers.checkpoint.manifest import FileRecord
from workers.checkpoint.writer import write_layers
from workers.commit.last_commit import LastCommit
from workers.commit.next_plan import NextPlan, check_buffers, check_next
from workers.commit.unfinished import Greeting
from workers.config import WorkerConfig
from workers.control.activity import Activity
from workers.control.mailbox import Mailbox
from workers.control.records_digest import vector_sha256
from workers.control.rescues import Rescues
from workers.data.dataset import OpenData
from workers.data.read_ahead import ReadAhead
from workers.data.registry import open_dataset
from workers.devices.device import Device
from workers.devices.registry import make_device
from workers.elastic.assembly import assemble
from workers.elastic.copies_ahead import CopiesAhead
from workers.elastic.holdings import Holdings
from workers.elastic.host_copies import HostForm
from workers.elastic.layer_source import LayerSource
from workers.elastic.modules_ahead import ModulesAhead
from workers.elastic.standby import Base, Standbys
from workers.elastic.switch import take_up
from workers.fault_injection.points import FaultPoints, Phase
from workers.freezing.plans import Plans, Settings, check_plan
from workers.layer_check.check import LayerCheck
from workers.layers.compiler import Compiler, compiler_of
from workers.layers.layer import Layer
from workers.loss_scale import LossScale
from workers.memory.shortage import shortage_in
from workers.models.definition import ModelDefinition
from workers.models.registry import build_definition
from workers.process.cores import pin_to_core
from workers.process.host_memory import collect_objects, free_host_bytes, keep_freed_pages
from workers.process.name_lookups import keep_lookups_short
from workers.profiling.measured import Measured
from workers.profiling.profiler import BUDGET_S, Subject, measure
from workers.protocol import (
    Assignment,
    CopyAhead,
    DamagedCheckpoint,
    Generation,
    JobError,
    Outcome,
    Parted,
    Position,
    Report,
    Request,
    Settlement,
    Source,
    SwitchReport,
    WarningReport,
    Working,
)
from workers.reproducibility import determinism
from workers.sampling.sampler import Sampler, sampler_of
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer, make_optimizer
from workers.state.precision import scales_loss
from workers.state_stream.following import Followers
from workers.state_stream.stream import StateServer
from workers.step.generation import GenerationSetup
from workers.step.training import Training
from workers.transport.channel import Channel
from workers.transport.membership import Membership


class Rank:
    """One rank of a job.

    Call `setup`, then for each generation `follow`, `join` and `train` in this order. After training that
    ended with a failure or as `Parted`, call `position` and `settle` before the next generation, and `records` in
    between if other ranks need them. `request`,
    `prepare`, `working` and `leave` may be called from any thread.

    Args:
        rank: its number, unique in the job for all time.
        report: receives every report; must not block.
        secret: the job's secret, with which ranks authenticate each other to fetch layers; without one it
            serves none.
        host: address at which it serves layers.
        observe: receives the times of every step if `[adapt]` wants them; must not block.
        log_sha256: returns the hash of a line of the job's event log, for the manifests of checkpoints; None if it
            knows none. Must not block.
        rescues: says when to write a checkpoint because the cluster's head is lost; None: there is none to lose.
    """

    def __init__(
        self,
        config: WorkerConfig,
        rank: int,
        report: Callable[[Report], None],
        *,
        secret: bytes = b"",
        host: str = "127.0.0.1",
        observe: Callable[[StepTimes], None] | None = None,
        log_sha256: Callable[[], str | None] = lambda: None,
        rescues: Rescues | None = None,
    ) -> None:
        self._config = config
        self._rescues = rescues if rescues is not None else Rescues(math.inf)
        self._rank = rank
        self._report = report
        self._log_sha256 = log_sha256
        self._observe = observe if config.adapt.policy != "off" else None
        self._sampler: Sampler | None = None
        """Sampler of its surroundings, if anyone wants to know them."""
        self._secret = secret
        self._host = host
        self._mailbox = Mailbox()
        self._activity = Activity()
        self._membership = Membership(rank)
        self._commit = LastCommit()
        self._holdings = Holdings(self._commit, self._warn)
        self._host_form: HostForm | None = None
        """Settings of its copies in host memory; None: it keeps them on its device."""
        self._followers = Followers()
        self._ahead: CopiesAhead | None = None
        """Layers of its coming place, while it has none."""
        self._newest_order = (0, 0)
        """Epoch and change of the newest order to copy layers, or to let go of them."""
        self._freeze_plans = Plans()
        self._check = LayerCheck(self._warn, config.precision)
        self._assignment: Assignment | None = None
        self._training: Training | None = None
        """The newest training, which settles an undecided commit."""
        self._began = 0
        """The newest step begun in its last training."""
        self._short = False
        """Whether its last training ended for want of memory."""
        self._compiler: Compiler | None = None
        self._told: set[str] = set()
        """Layers of which it has said why they are not compiled."""
        self._source: LayerSource | None = None
        self._coming: ModulesAhead[tuple[Layer, LayerState]] | None = None
        """Modules that it builds for the next generation while it trains."""
        self.faults = FaultPoints(
            report,
            rank=rank,
            allowed=config.elastic.allow_faults,
            sever=self.leave,
            corrupt=partial(corrupt_newest_checkpoint, config.output),
        )

    def setup(self) -> None:
        """Fix core, threads and kernels, resolve the model definition, open the data, and serve layers to other
        ranks. The thread that calls it is the one that trains.

        Raises:
            JobError: the factory, the data or the device is not usable, or no core can be fixed.
        """
        config = self._config
        if config.pin_cores:
            pin_to_core(self._rank)
        determinism.fix(threads=config.threads, cuda=config.device == "cuda")
        keep_freed_pages()
        keep_lookups_short()
        self._data: OpenData = open_dataset(config.data, config.model, config.output)
        self._definition: ModelDefinition = build_definition(config.model, self._data.vocabulary)
        self._device: Device = make_device(config, len(self._definition.layers))
        self._reading = ReadAhead(self._device.torch_device, config.threads, config.seed)
        if self._observe is not None and self._sampler is None:
            self._sampler = sampler_of(self._device.torch_device)
        self._optimizer: Optimizer = make_optimizer(config.optimizer, config.steps)
        self._optimizer.check_ties(self._definition.ties)
        if self._definition.ties and config.elastic.salvage != "none":
            raise JobError(
                f'elastic.salvage = "{config.elastic.salvage}" gives layers other moments than those that they share'
                " parameters with, and shared parameters would drift apart: leave salvage out, or untie the model's"
                " layers"
            )
        if config.compile:
            self._compiler = compiler_of(config, self._definition, self._data, self._device.torch_device)
        self._source = LayerSource(
            config, self._definition, self._device, self._optimizer, self._secret, self.faults, self._compiler
        )
        self._coming = ModulesAhead(self._source.build_ahead, self._tell_unbuilt)
        if config.elastic.copies_on_host(config.device):
            self._host_form = HostForm(
                device=self._device.torch_device,
                every=config.elastic.refresh_every,
                build=self._source.build_copy,
                free_bytes=free_host_bytes,
            )
        if self._secret:
            busy = self._membership.sending
            self._holdings.serve_with(
                StateServer(self._secret, self._host, busy=busy, followers=self._followers)
            )

    @property
    def port(self) -> int:
        """The port at which it serves layers; 0 for none."""
        return self._holdings.port

    def follow(self, assignment: Assignment) -> DamagedCheckpoint | None:
        """Load the layers that the assignment gives this rank.

        It takes their state from `assignment.start`, if given. Otherwise it uses what it holds of
        `assignment.step`, fetches the rest, or, before the first step, uses the initial values.

        Returns:
            The damage in `start` or `moments`, if any: call again with an older checkpoint.

        Raises:
            JobError: the checkpoint or a freeze plan is for another model.
            StateStreamError: a source is gone, or `leave` was called. Layers that had arrived are kept: they
                may be the last copies.
        """
        source, coming, commit, holdings = self._source, self._coming, self._commit, self._holdings
        assert source is not None
        assert coming is not None
        plan, step, plans = assignment.plan, assignment.step, Plans(assignment.freeze)
        freeze = Settings(self._config.freeze, plans)
        wanted = plan.layers_of_place(assignment.place)
        source.begin(freeze, plan.shard_of_place(assignment.place), coming.taken(), wanted)
        holdings.snapshots.forget_after(-1 if assignment.fresh else step)
        if self._training is not None:
            self.faults.reach(Phase.RECOVERING, commit.step)
        if self._short:
            self._short = False
            self._device.release()
        if assignment.start is not None or step != commit.step:
            self._training = None
            holdings.clear()
        for known in assignment.freeze:
            self._check_freeze_plan(known)
        ahead, self._ahead = self._ahead, None
        copied = {} if ahead is None else ahead.for_assignment(assignment, self._membership.over)
        try:
            has = assemble(assignment, holdings, copied, source, self._host_form)
            loss_scale = self._loss_scale_at(assignment)
        except DamagedCheckpointError as error:
            return error.damage
        source.end()
        check_buffers(plan, (state for _, state in has.layers.values()))
        standbys = Standbys(
            plan.copies_at(assignment.place),
            has.bases,
            freeze=freeze,
            optimizer=self._optimizer,
            step=step,
            host=self._host_form,
            known=has.on_host,
        )
        holdings.take_up(
            has.layers, standbys, {**has.spare, **has.bases}, has.on_host, has.salvaged, has.mixed
        )
        if assignment.start is not None or not step or step != commit.step:
            commit.move_to(step, loss_scale)
        self._freeze_plans = plans
        self._assignment = assignment
        self._training = None
        return None

    def _loss_scale_at(self, assignment: Assignment) -> LossScale | None:
        """The loss scale of the step after the assignment's, where the precision needs one and it is known.

        Raises:
            DamagedCheckpointError: the checkpoint to start from has none.
        """
        if assignment.start is not None:
            return read_loss_scale(assignment.start, self._config.precision)
        if assignment.step == 0:
            return LossScale() if scales_loss(self._config.precision) else None
        return assignment.loss_scale

    def copy_ahead(self, order: CopyAhead) -> None:
        """Copy layers of its coming place while others train, in threads. Takes the place of an earlier order; one that
        another has overtaken, or for a generation that is over, is ignored. One without layers lets go of what was
        copied and built."""
        source, coming = self._source, self._coming
        assert source is not None
        assert coming is not None
        freeze = Settings(self._config.freeze, Plans(order.freeze))
        with self._membership.lasting(order.generation) as lasts:
            if not lasts or (order.epoch, order.change) < self._newest_order:
                return
            self._newest_order = order.epoch, order.change
            source.end()
            source.begin(freeze)
            coming.ready(order.building)
            before, self._ahead = self._ahead, None
            if order.sources:
                self._ahead = CopiesAhead(
                    order,
                    self._rank,
                    source=source,
                    freeze=freeze,
                    optimizer=self._optimizer,
                    secret=self._secret,
                    report=self._report,
                    built=lambda: coming.settled,
                    gave_up=lambda: self._let_go(order),
                )
        if before is not None:
            before.close()
        del before
        collect_objects()

    def _let_go(self, order: CopyAhead) -> None:
        """The change of ranks that `order` is for does not come: drop what was built for it, unless there is a newer
        one."""
        assert self._coming is not None
        with self._membership.lasting(order.generation) as lasts:
            if lasts and self._newest_order == (order.epoch, order.change):
                self._coming.stop()
        collect_objects()

    def host_store(self, host: str = "127.0.0.1") -> int:
        """Host the store through which a generation forms, on the interface of `host`; returns its port."""
        return self._membership.host_store(host)

    def join(self, generation: Generation, channel: Channel | None = None) -> None:
        """Form the generation's process group; waits for all its members. Threads of one process pass a
        `channel`."""
        self.leave()
        self._mailbox.void()
        self._membership.join(generation, self._device.torch_device, channel)

    def train(self) -> Outcome | Parted:
        """Train until the last step, a STOP or a REGROUP; blocks, and streams reports.

        Raises:
            OutOfMemory: this rank has not enough memory for the step.
            ChannelError: another rank is gone, or `leave` was called.
        """
        generation, channel = self._membership.generation, self._membership.channel
        assert generation is not None
        assert channel is not None
        self._holdings.begin_training()
        self._followers.begin(generation.number)
        setup = self._generation_setup()
        self._tell_uncompiled(setup)
        self._training = Training(setup, generation, channel, self._commit.step)
        try:
            while isinstance(end := self._training.run(), NextPlan):
                setup = self._switch(end, setup, self._training)
            return end
        except BaseException as error:
            # The neighbours must learn of it at once, and their neighbours from them.
            self.leave()
            self._short = shortage_in(error) is not None
            raise
        finally:
            # Standbys of a plan switch that failed half-way have not been trained with yet.
            self._holdings.end_training()
            self._take_over(self._training)

    def _generation_setup(self) -> GenerationSetup:
        """Setup with which the rank trains, from its assignment on."""
        assignment, holdings, source = self._assignment, self._holdings, self._source
        assert assignment is not None
        assert holdings.standbys is not None
        assert source is not None
        assert self._coming is not None
        return GenerationSetup(
            config=self._config,
            rank=self._rank,
            place=assignment.place,
            plan=assignment.plan,
            program=assignment.program,
            definition=self._definition,
            data=self._data,
            reading=self._reading,
            layers=holdings.layers,
            optimizer=self._optimizer,
            device=self._device,
            mailbox=self._mailbox,
            standbys=holdings.standbys,
            greeting=Greeting(
                host=self._host,
                port=self.port,
                left=self._commit.left,
                lacks=holdings.standbys.lacking,
                loss_scale=self._commit.loss_scale,
            ),
            offer=holdings.offer_bases,
            bring=self._bring_base(),
            build=source.module,
            coming=self._coming,
            withdraw=holdings.withdraw,
            snapshots=holdings.snapshots,
            resumed=assignment.start is not None,
            fetch=source.fetch_copy,
            followers=self._followers,
            freeze_plans=self._freeze_plans,
            faults=self.faults,
            activity=self._activity,
            check=self._check,
            rescues=self._rescues,
            report=self._report,
            log_sha256=self._log_sha256,
            observe=self._observe,
            surroundings=self._surroundings,
        )

    def _bring_base(self) -> Callable[[Piece, Greeting, threading.Event], Base]:
        """Fetches the base of a copy at the newest commit."""
        assert self._source is not None
        return partial(self._source.fetch_base, self._commit.step, on_host=self._host_form is not None)

    def _switch(self, following: NextPlan, setup: GenerationSetup, before: Training) -> GenerationSetup:
        """Follow another plan from the next step on, in the same generation."""
        generation, channel = self._membership.generation, self._membership.channel
        assert generation is not None
        assert channel is not None
        assert self._assignment is not None
        self._take_over(before)
        brought_bytes, brought_s = setup.standbys.brought_bytes, setup.standbys.brought_s
        has = take_up(
            following.plan,
            setup.place,
            self._holdings.layers,
            setup.standbys,
            before.upkeep.modules.taken(),
            freeze=Settings(self._config.freeze, self._freeze_plans),
            optimizer=self._optimizer,
            step=self._commit.step,
        )
        self._holdings.switch(has.layers, has.standbys)
        self._assignment = replace(self._assignment, plan=following.plan, program=following.program)
        self._mailbox.taken_up(following)
        if setup.pipeline == 0 or following.plan.shards > 1:
            self._holdings.offer_bases(following.bases(setup.plan))
        channel.renew()
        setup = replace(
            setup,
            plan=following.plan,
            program=following.program,
            layers=has.layers,
            standbys=has.standbys,
            held=following.held,
            bring=self._bring_base(),
        )
        self._tell_uncompiled(setup)
        self._training = Training(setup, generation, channel, self._commit.step, before)
        # At once: the controller acts on it only when every rank has said so, and then the commit is settled.
        self._report(
            SwitchReport(
                step=self._commit.step,
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

    def _tell_uncompiled(self, setup: GenerationSetup) -> None:
        """Report which of its layers are not compiled, and why, once."""
        if self._compiler is None or setup.pipeline != 0:
            return
        names = {self._definition.names[layer] for layer in setup.layers}
        for name, why in self._compiler.why_not.items():
            if name in names - self._told:
                self._told.add(name)
                text = f"layer {name} is not compiled: {why}. It computes as without job.compile"
                self._warn(text)

    def _tell_unbuilt(self, why: str) -> None:
        self._warn(f"{why}; it is built while the ranks wait")

    def _warn(self, text: str) -> None:
        self._report(WarningReport(rank=self._rank, text=text))

    def _surroundings(self) -> Sample | None:
        return None if self._sampler is None else self._sampler.newest

    def _take_over(self, training: Training) -> None:
        """Keep what outlives a generation."""
        commit = self._commit
        commit.step, commit.left, commit.loss_scale = training.step, training.left, training.loss_scale
        if training.vector is not None:
            commit.vector = training.vector
        self._began = training.began
        together = self._config.elastic.salvage != "none" and training.weights_together
        self._holdings.siblings_weights_known = together

    def working(self) -> Working | None:
        """The action that it is computing; None: it waits for other ranks, or does something else."""
        return self._activity.working()

    def position(self) -> Position:
        """Its position, once it no longer trains: the next try to form a generation begins with it.

        Raises:
            RuntimeError: an update broke off, so its layers are of no step.
        """
        training, commit = self._training, self._commit
        if training is not None and training.torn:
            raise RuntimeError(f"rank {self._rank}: an update broke off in its middle; its layers are lost")
        self._holdings.begin_try()
        return Position(
            rank=self._rank,
            step=commit.step,
            vector_sha256=None if commit.vector is None else vector_sha256(commit.vector),
            undecided=training.undecided if training is not None else None,
            began=self._began,
            holds=self._holdings.pieces(),
            weights=tuple(sorted(self._holdings.weights_only())),
            freeze_plans=self._freeze_plans.known,
            loss_scale=commit.loss_scale,
            snapshots=self._holdings.snapshots.held(),
            host=self._host,
            port=self.port,
        )

    def records(self) -> tuple[bytes, ...]:
        """All ranks' records of the commit of its step, for ranks that do not know the outcome.

        Raises:
            JobError: it has none.
        """
        if self._commit.vector is None:
            raise JobError(f"rank {self._rank} has no records of the commit of step {self._commit.step}")
        return self._commit.vector

    def settle(self, settlement: Settlement) -> None:
        """Apply or drop the undecided commit, and offer the layers of the settled step.

        A rank that ends at another step holds nothing useful; it fetches all its layers from other ranks.
        """
        if self._training is not None:
            self._training.settle(settlement)
            self._take_over(self._training)
        if self._commit.step == settlement.step:
            self._holdings.offer()
            self._holdings.offer_weights_only()

    def save(
        self, folder: str, step: int, layers: Sequence[int], sources: Sequence[Source] = ()
    ) -> tuple[FileRecord, ...]:
        """Write `layers` into the checkpoint of `step` at `folder`, while it does not train.

        Args:
            sources: of all shards of those layers of which it holds shards only.

        Raises:
            JobError: it is at another step, or the file system refused.
            StateStreamError: a source is gone.
        """
        assert self._source is not None
        if self._commit.step != step and not self._holdings.of_snapshot(step):
            raise JobError(
                f"rank {self._rank} stands at step {self._commit.step}: it cannot save step {step}"
            )
        try:
            copies = self._holdings.copies(step, layers, sources, self._source.fetch)
        except MemoryError as error:
            raise JobError(f"rank {self._rank} could not write to {folder}: {error}") from error
        result = write_layers(folder, step, copies, self.faults)
        if result.error is not None:
            raise JobError(f"rank {self._rank} could not write to {folder}: {result.error}")
        return result.records

    def seal(
        self, folder: str, step: int, plan: Plan, generation: int, records: Sequence[FileRecord]
    ) -> None:
        """Complete the checkpoint of `step` at `folder`, once all ranks have written their parts.

        Args:
            plan: the plan that was in force.
            generation: the generation in its manifest.

        Raises:
            JobError: the file system refused.
        """
        now = self._commit.step == step
        scale = self._commit.loss_scale if now else self._holdings.snapshots.loss_scale(step)
        if scales_loss(self._config.precision) and scale is None:
            raise JobError(
                f"rank {self._rank} does not know the loss scale after step {step}: {folder} is not whole"
            )
        files = {record.name: record for record in records}
        try:
            log = self._log_sha256()
            seal(self._config, self._definition.names, plan, folder, step, generation, files, scale, log)
        except OSError as error:
            raise JobError(f"could not complete {folder}: {error.strerror or error}") from error

    def profile(self, budget_s: float = BUDGET_S) -> Measured:
        """Measure layers, links and commit, instead of following a plan. All members of the generation call
        it together.

        Args:
            budget_s: how long to measure the layers.

        Raises:
            ChannelError: another rank is gone, or `leave` was called.
            JobError: a layer fails.
        """
        channel = self._membership.channel
        assert channel is not None
        subject = Subject(
            config=self._config,
            rank=self._rank,
            definition=self._definition,
            data=self._data,
            device=self._device,
            optimizer=self._optimizer,
            channel=channel,
            host=self._host,
            compiler=self._compiler,
            check=LayerCheck(_nobody, self._config.precision),
        )
        return measure(subject, budget_s)

    def request(self, request: Request) -> None:
        """Put a request into the mailbox; it takes effect at a commit, on all ranks."""
        self._mailbox.put(request)

    def prepare(self, plan: FreezePlan) -> None:
        """Prepare a freeze plan.

        The ranks adopt it at the first commit for which every rank of the generation has prepared it, and
        follow it from the next step on; the first rank then reports `FreezeStarted`. A new generation voids
        it.

        Raises:
            JobError: the job's method uses no ratios, or they do not fit its layers and microbatches.
        """
        self._check_freeze_plan(plan)
        self._mailbox.prepare(plan)

    def prepare_plan(
        self,
        plan: Plan,
        program: RankProgram,
        generation: int,
        held: Arrivals = (),
        building: Collection[Piece] = (),
    ) -> None:
        """Prepare another pipeline plan.

        This rank is ready to follow it once it has every layer, or shard, of its part, as owner or as an up-to-date
        copy, and a module for it. It says so in each commit; after the first commit in which every rank is ready, all
        follow the plan and report `SwitchReport`. A new generation voids it; a call for one that is over, or that a
        newer plan has overtaken, has no effect.

        Args:
            program: this rank's part of the plan's schedule.
            generation: the one that is to follow it.
            held: layers, or shards, whose updates are held back under this plan, and their destinations;
                see `workers.elastic.held_updates`.
            building: what this rank will own in the next generation and has no module for: it builds that beside
                training, and says with `StandbyReport.built` once it is there.

        Raises:
            JobError: it is not newer than the plan in force, needs another generation, or cannot be followed with
                these layers.
        """
        with self._membership.lasting(generation) as lasts:
            if not lasts:
                return
            if self._assignment is None:
                raise JobError(f"rank {self._rank} follows no plan yet, so that none can take its place")
            check_next(plan, program, self._assignment.plan, self._assignment.place)
            check_buffers(plan, (state for _, state in self._holdings.layers.values()))
            newest = self._mailbox.prepare_plan(NextPlan(plan, program, tuple(held)))
            if newest and self._coming is not None:
                self._coming.ready(building)

    def _check_freeze_plan(self, plan: FreezePlan) -> None:
        method = self._config.freeze.method
        if plan.control is None and not self._config.freeze.timely:
            raise JobError(
                f"freeze.method is {method!r}, which follows no ratios: use a `timelyfreeze` method"
            )
        check_plan(plan, len(self._definition.layers), self._config.microbatches)

    def leave(self, generation: int = 0) -> None:
        """Drop the process group. Every call waiting in it, here or at a neighbour, raises; so do calls here
        that wait to join a group or for layers of other ranks.

        Args:
            generation: this generation and earlier ones are over: a later `join` of them raises. A rank in a
                newer one stays there.
        """
        if not self._membership.end(generation):
            return
        if self._source is not None:
            self._source.stop()
        self._membership.leave()

    def close(self) -> None:
        """Leave, and stop hosting the store.

        After successful training, call it only once all ranks have returned from `train`: the last collective
        may still be running at a neighbour.
        """
        self.leave()
        self._membership.close()
        self._holdings.close()
        self.faults.close()
        if self._coming is not None:
            self._coming.stop()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._compiler is not None:
            self._compiler.close()


def _nobody(text: str) -> None:
    """Takes what the profile says by itself."""
