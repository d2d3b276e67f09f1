"""One rank, from configuration to outcome. No Ray here: it runs in an actor, a process or a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from planner.arrivals import Arrivals
from planner.features import Sample
from planner.freezing import FreezePlan
from planner.observed import StepTimes
from planner.plan import Plan
from planner.shards import WHOLE, Piece
from workers.checkpoint.coordination import seal
from workers.checkpoint.corruption import corrupt_newest_checkpoint
from workers.checkpoint.folder import DamagedCheckpointError, read_manifest
from workers.checkpoint.manifest import FileRecord
from workers.checkpoint.writer import write_layers
from workers.commit import vector_sha256
from workers.compiled.compiler import Compiler, compiler_of
from workers.config import WorkerConfig
from workers.control.activity import Activity
from workers.control.mailbox import Mailbox
from workers.control.next_plan import NextPlan, check_next
from workers.control.rank_program import RankProgram
from workers.data.dataset import OpenData
from workers.data.read_ahead import ReadAhead
from workers.data.registry import open_dataset
from workers.devices.device import Device
from workers.devices.registry import make_device
from workers.elastic.copies_ahead import CopiesAhead
from workers.elastic.host_copies import HostCopy, HostForm
from workers.elastic.layer_source import Built, Haul, Held, LayerSource, base_of
from workers.elastic.snapshots import Snapshots
from workers.elastic.standby import Base, Standbys
from workers.elastic.switch import take_up
from workers.fault_injection.points import FaultPoints, Phase
from workers.freezing.plans import Plans, Settings, check_plan
from workers.generation import GenerationSetup
from workers.layer import Layer
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
    CheckpointRef,
    CopyAhead,
    DamagedCheckpoint,
    Generation,
    JobError,
    Outcome,
    Part,
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
from workers.state.layer_state import LayerState, apart, bytes_of, host_copy, in_host_memory, whole_of
from workers.state.loss_scale import LossScale
from workers.state.optim import Optimizer, make_optimizer
from workers.state.precision import scales_loss
from workers.state_stream.following import Followers
from workers.state_stream.frames import StateStreamError
from workers.state_stream.stream import StateServer
from workers.training import Training
from workers.transport.channel import Channel, ChannelError
from workers.transport.joining import Joining
from workers.transport.open_channel import open_channel
from workers.unfinished import Greeting, Unfinished


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
    ) -> None:
        self._config = config
        self._rank = rank
        self._report = report
        self._observe = observe if config.adapt.policy != "off" else None
        self._sampler: Sampler | None = None
        """Of its surroundings, if anyone wants to know them."""
        self._secret = secret
        self._host = host
        self._mailbox = Mailbox()
        self._activity = Activity()
        self._store: dist.TCPStore | None = None
        self._channel: Channel | None = None
        self._joining: Joining | None = None
        self._leaving = threading.Lock()
        self._over = 0
        """The newest generation that is known to be over."""
        self._generation: Generation | None = None
        self._server: StateServer | None = None
        self._step = 0
        self._layers: Built = {}
        self._idle: Held = {}
        """Layers of `_step`, and shards of them, that it holds without owning them, until it trains again."""
        self._on_host: dict[Piece, HostCopy] = {}
        """Copies in host memory that know `_step`, until it trains again."""
        self._salvaged: dict[int, LayerState] = {}
        """Layer -> weights of `_step`, for layers whose moments are lost, until it trains with them."""
        self._standbys: Standbys | None = None
        self._host_form: HostForm | None = None
        """How it keeps copies in host memory; None: it keeps them on its device."""
        self._snapshots = Snapshots(self._keep_offered, self._let_go)
        self._followers = Followers()
        self._ahead: CopiesAhead | None = None
        """Layers of its coming place, while it has none."""
        self._freeze_plans = Plans()
        self._assignment: Assignment | None = None
        self._training: Training | None = None
        """The newest training, which settles an undecided commit."""
        self._vector: tuple[bytes, ...] | None = None
        self._left: Unfinished | None = None
        self._loss_scale: LossScale | None = None
        """Of the step after `_step`, where the precision needs one and this rank knows it."""
        self._began = 0
        """The newest step begun in its last training."""
        self._short = False
        """Whether its last training ended for want of memory."""
        self._compiler: Compiler | None = None
        self._told: set[str] = set()
        """Layers of which it has said why they are not compiled."""
        self._source: LayerSource | None = None
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
        self._reading = ReadAhead(self._device.torch_device, config.threads)
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
        if config.elastic.copies_on_host(config.device):
            self._host_form = HostForm(
                device=self._device.torch_device,
                every=config.elastic.refresh_every,
                build=self._source.build_copy,
                free_bytes=free_host_bytes,
            )
        if self._secret:
            self._server = StateServer(self._secret, self._host, busy=self._busy, followers=self._followers)

    @property
    def port(self) -> int:
        """The port at which it serves layers; 0 for none."""
        return self._server.port if self._server is not None else 0

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
        source = self._source
        assert source is not None
        plans = Plans(assignment.freeze)
        freeze = Settings(self._config.freeze, plans)
        plan = assignment.plan
        shard = plan.shard_of_place(assignment.place)
        source.begin(freeze, shard)
        self._snapshots.forget_after(-1 if assignment.fresh else assignment.step)
        if self._training is not None:
            self.faults.reach(Phase.RECOVERING, self._step)
        if self._short:
            self._short = False
            self._device.release()
        if assignment.start is not None or assignment.step != self._step:
            self._let_go_of_layers()
        for known in assignment.freeze:
            self._check_freeze_plan(known)
        owned = plan.layers_of_place(assignment.place)
        copied = plan.copies_at(assignment.place)
        host = self._host_form
        salvaged: dict[int, LayerState] = {}
        ahead = self._copied_ahead(assignment)
        held: Held = {}
        on_host: dict[Piece, HostCopy] = {}
        if assignment.start is not None:
            try:
                known, bases = _begun(owned, copied, partial(source.load, start=assignment.start), host)
                self._loss_scale = self._scale_of(assignment.start)
            except DamagedCheckpointError as error:
                return error.damage
            self._vector = self._left = None
        elif assignment.step == 0:
            known, bases = _begun(owned, copied, source.initial, host)
            self._loss_scale = LossScale() if scales_loss(self._config.precision) else None
        else:
            live = self._held() if self._step == assignment.step else {}
            on_host = self._held_on_host() if self._step == assignment.step else {}
            self._offer(live, on_host)
            held = self._kept(assignment.step) | live | ahead
            haul = _haul_of(ahead)
            known = {layer: one for layer in owned if (one := _live(held, Piece(layer, shard)))}
            for layer in owned:
                if layer not in known and (copy := on_host.get(Piece(layer, shard))) is not None:
                    known |= source.build([layer], assignment.step)
                    copy.load_into(known[layer][1])
            bases = _bases([piece for piece in copied if piece not in on_host], held, host)
            lacking = [layer for layer in owned if layer not in known]
            held |= {
                piece: (None, copy.newest()) for piece, copy in on_host.items() if piece.layer in lacking
            }
            try:
                source.fetch_all(lacking, assignment, haul, held)
            except (DamagedCheckpointError, StateStreamError) as error:
                self._keep(haul, assignment)
                if isinstance(error, DamagedCheckpointError):
                    return error.damage
                raise
            known |= haul.whole
            held |= {piece: (None, state) for piece, state in haul.pieces.items()} | _held(haul.whole)
            before = self._salvaged if self._step == assignment.step else {}
            weights = {**before, **haul.weights}
            salvaged = {layer: weights[layer] for layer in assignment.salvaged if layer in weights}
        self._layers = {layer: known[layer] for layer in owned}
        self._check_shares(plan, self._layers)
        self._standbys = Standbys(
            copied,
            bases,
            freeze=freeze,
            optimizer=self._optimizer,
            step=assignment.step,
            host=host,
            known=on_host,
        )
        held |= _held(known) | bases
        own = _held(self._layers)
        self._idle = {piece: one for piece, one in held.items() if piece not in own}
        self._on_host = on_host
        self._salvaged = salvaged
        if self._step != assignment.step:
            self._vector = self._left = None
            if assignment.start is None and assignment.step:
                self._loss_scale = assignment.loss_scale
        self._step = assignment.step
        self._freeze_plans = plans
        self._assignment = assignment
        self._training = None
        return None

    def _scale_of(self, start: CheckpointRef) -> LossScale | None:
        """The loss scale of the step after the checkpoint `start`, where the precision needs one.

        Raises:
            DamagedCheckpointError: it has none.
        """
        if not scales_loss(self._config.precision):
            return None
        scale = read_manifest(start).loss_scale
        if scale is None:
            problem = f'has no loss scale, which job.precision = "{self._config.precision}" needs'
            raise DamagedCheckpointError(
                DamagedCheckpoint(path=start.path, file="manifest.json", problem=problem)
            )
        return scale

    def copy_ahead(self, order: CopyAhead) -> None:
        """Copy layers of its coming place while others train, in threads. Takes the place of an earlier order; one for
        a generation that is over is ignored."""
        assert self._source is not None
        freeze = Settings(self._config.freeze, Plans(order.freeze))
        with self._leaving:
            if order.generation <= self._over:
                return
            self._source.begin(freeze)
            before, self._ahead = (
                self._ahead,
                CopiesAhead(
                    order,
                    self._rank,
                    source=self._source,
                    freeze=freeze,
                    optimizer=self._optimizer,
                    secret=self._secret,
                    report=self._report,
                ),
            )
        if before is not None:
            before.close()

    def _copied_ahead(self, assignment: Assignment) -> Held:
        """The layers, or shards, that it has copied ahead, if they are at the step at which the generation ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return {}
        # Copies of an earlier generation may be of commits that were taken back since. And where only weights are left
        # of a layer, all ranks begin with the same moments.
        if ahead.generation != self._over or assignment.salvaged or not assignment.sources:
            ahead.close()
            return {}
        copies = ahead.at(assignment.step)
        if ahead.why is not None:
            text = f"layers that rank {self._rank} copied ahead are fetched again: {ahead.why}"
            self._report(WarningReport(rank=self._rank, text=text))
        return copies

    def _keep(self, haul: Haul, assignment: Assignment) -> None:
        """Keep the layers that arrived although some did not, and drop those of another step: all ranks move
        to `assignment.step`."""
        if self._step != assignment.step:
            self._vector = self._left = None
            self._loss_scale = assignment.loss_scale
        self._step = assignment.step
        whole = {layer: one for layer, one in haul.whole.items() if layer not in assignment.salvaged}
        weights = {**self._salvaged, **haul.weights}
        self._salvaged = {layer: state for layer, state in weights.items() if layer not in whole}
        self._idle |= _held(whole) | {piece: (None, state) for piece, state in haul.pieces.items()}

    def _let_go_of_layers(self) -> None:
        """All ranks move to another step: what it holds of its own is of no use, and takes the memory of what comes."""
        self._layers, self._idle, self._on_host, self._salvaged = {}, {}, {}, {}
        self._standbys = self._training = None
        self._withdraw()
        collect_objects()

    def _held_on_host(self) -> dict[Piece, HostCopy]:
        """All copies in host memory that know `_step`."""
        copies: dict[Piece, HostCopy] = {}
        if self._training is not None and self._standbys is not None:
            copies = self._standbys.held_on_host()
        held = {**self._on_host, **copies}
        return {piece: one for piece, one in held.items() if piece.layer not in self._salvaged}

    def _held(self) -> Held:
        """All layers of `_step`, and shards of them, whose state is complete here, but for copies in host memory."""
        # Before a generation trains, its copies are among the idle layers.
        copies: Held = {}
        if self._training is not None and self._standbys is not None:
            copies = self._standbys.held()
        held = {**self._idle, **copies, **_held(self._layers)}
        return {piece: one for piece, one in held.items() if piece.layer not in self._salvaged}

    def _kept(self, step: int) -> Held:
        """What is here of the snapshot of `step`."""
        return {piece: (None, state) for piece, state in self._snapshots.states(step).items()}

    def host_store(self, host: str = "127.0.0.1") -> int:
        """Host the store through which a generation forms, on the interface of `host`; returns its port."""
        if self._store is None:
            listener = socket.create_server((host, 0))
            self._store = dist.TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=60),
            )
        return self._store.port

    def join(self, generation: Generation, channel: Channel | None = None) -> None:
        """Form the generation's process group; waits for all its members. Threads of one process pass a
        `channel`."""
        self.leave()
        self._mailbox.void()
        self._generation = generation
        if channel is None:
            joining = Joining(lambda: open_channel(generation, self._rank, self._device.torch_device))
            with self._leaving:
                if generation.number <= self._over:
                    raise ChannelError(f"generation {generation.number} was over before this rank joined it")
                self._joining = joining
            channel = joining.wait()
        with self._leaving:
            self._channel = channel
            over = generation.number <= self._over
        if over:
            channel.close()
            raise ChannelError(f"generation {generation.number} was over as this rank had joined it")

    def train(self) -> Outcome | Parted:
        """Train until the last step, a STOP or a REGROUP; blocks, and streams reports.

        Raises:
            OutOfMemory: this rank has not enough memory for the step.
            ChannelError: another rank is gone, or `leave` was called.
        """
        assert self._channel is not None
        assert self._generation is not None
        assert self._assignment is not None
        assert self._standbys is not None
        assert self._source is not None
        assignment = self._assignment
        # Every rank has joined, so every rank has the layers that it needs.
        self._idle, self._on_host, self._salvaged = {}, {}, {}
        self._withdraw()
        self._followers.begin(self._generation.number)
        setup = GenerationSetup(
            config=self._config,
            rank=self._rank,
            place=assignment.place,
            plan=assignment.plan,
            program=assignment.program,
            definition=self._definition,
            data=self._data,
            reading=self._reading,
            layers=self._layers,
            optimizer=self._optimizer,
            device=self._device,
            mailbox=self._mailbox,
            standbys=self._standbys,
            greeting=Greeting(
                host=self._host,
                port=self.port,
                left=self._left,
                lacks=self._standbys.lacking,
                loss_scale=self._loss_scale,
            ),
            offer=self._offer_bases,
            bring=self._bring_base(),
            build=self._source.module,
            withdraw=self._withdraw,
            snapshots=self._snapshots,
            resumed=assignment.start is not None,
            fetch=self._source.fetch_copy,
            followers=self._followers,
            freeze_plans=self._freeze_plans,
            faults=self.faults,
            activity=self._activity,
            report=self._report,
            observe=self._observe,
            surroundings=self._surroundings,
        )
        self._tell_uncompiled(setup)
        self._training = Training(setup, self._generation, self._channel, self._step)
        try:
            while isinstance(end := self._training.run(), NextPlan):
                setup = self._switch(end, setup)
            return end
        except BaseException as error:
            # The neighbours must learn of it at once, and their neighbours from them.
            self.leave()
            self._short = shortage_in(error) is not None
            raise
        finally:
            # Standbys of a plan switch that failed half-way have not been trained with yet.
            self._standbys.rest()
            self._snapshots.stop()
            self._take_over(self._training)

    def _switch(self, following: NextPlan, setup: GenerationSetup) -> GenerationSetup:
        """Follow another plan from the next step on, in the same generation."""
        assert self._generation is not None
        assert self._channel is not None
        assert self._training is not None
        assert self._assignment is not None
        assert self._source is not None
        before, place = self._training, setup.place
        self._take_over(before)
        brought_bytes, brought_s = setup.standbys.brought_bytes, setup.standbys.brought_s
        has = take_up(
            following.plan,
            place,
            self._layers,
            setup.standbys,
            before.modules.taken(),
            freeze=Settings(self._config.freeze, self._freeze_plans),
            optimizer=self._optimizer,
            step=self._step,
        )
        self._layers, self._standbys = has.layers, has.standbys
        self._assignment = replace(self._assignment, plan=following.plan, program=following.program)
        self._mailbox.taken_up(following)
        if setup.pipeline == 0 or following.plan.shards > 1:
            self._offer_bases(following.bases(setup.plan))
        self._channel.renew()
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
        self._training = Training(setup, self._generation, self._channel, self._step, before)
        # At once: the controller acts on it only when every rank has said so, and then the commit is settled.
        self._report(
            SwitchReport(
                step=self._step,
                rank=place,
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

    def _bring_base(self) -> Callable[[Piece, Greeting, threading.Event], Base]:
        """Fetches the base of a copy at `_step`."""
        assert self._source is not None
        assert self._standbys is not None
        return partial(self._source.fetch_base, self._step, on_host=self._standbys.host is not None)

    def _tell_uncompiled(self, setup: GenerationSetup) -> None:
        """Report which of its layers are not compiled, and why, once."""
        if self._compiler is None or setup.pipeline != 0:
            return
        names = {self._definition.names[layer] for layer in setup.layers}
        for name, why in self._compiler.why_not.items():
            if name in names - self._told:
                self._told.add(name)
                text = f"layer {name} is not compiled: {why}. It computes as without job.compile"
                self._report(WarningReport(rank=self._rank, text=text))

    def _offer_bases(self, pieces: Iterable[Piece]) -> None:
        """Offer copies of those of `pieces` that it owns, as they are now."""
        if self._server is not None:
            own = _held(self._layers)
            mine = [host_copy(own[piece][1]) for piece in pieces if piece in own]
            if mine:
                self._server.offer(self._step, mine)

    def _surroundings(self) -> Sample | None:
        return None if self._sampler is None else self._sampler.newest

    def working(self) -> Working | None:
        """The action that it is computing; None: it waits for other ranks, or does something else."""
        return self._activity.working()

    def position(self) -> Position:
        """Its position, once it no longer trains.

        Raises:
            RuntimeError: an update broke off, so its layers are of no step.
        """
        training = self._training
        if training is not None and training.torn:
            raise RuntimeError(f"rank {self._rank}: an update broke off in its middle; its layers are lost")
        return Position(
            rank=self._rank,
            step=self._step,
            vector_sha256=None if self._vector is None else vector_sha256(self._vector),
            undecided=training.undecided if training is not None else None,
            began=self._began,
            holds=tuple(sorted({*self._held(), *self._held_on_host()})),
            weights=tuple(sorted(self._salvaged)),
            freeze_plans=self._freeze_plans.known,
            loss_scale=self._loss_scale,
            snapshots=self._snapshots.held(),
            host=self._host,
            port=self.port,
        )

    def records(self) -> tuple[bytes, ...]:
        """All ranks' records of the commit of its step, for ranks that do not know the outcome.

        Raises:
            JobError: it has none.
        """
        if self._vector is None:
            raise JobError(f"rank {self._rank} has no records of the commit of step {self._step}")
        return self._vector

    def settle(self, settlement: Settlement) -> None:
        """Apply or drop the undecided commit, and offer the layers of the settled step.

        A rank that ends at another step holds nothing useful; it fetches all its layers from other ranks.
        """
        if self._training is not None:
            self._training.settle(settlement)
            self._take_over(self._training)
        if self._step == settlement.step:
            self._offer(self._held(), self._held_on_host())
            if self._server is not None:
                self._server.offer(self._step, self._salvaged.values(), Part.WEIGHTS)

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
        held, copies = self._kept(step), list[LayerState]()
        if self._step == step:
            on_host = {piece: one for piece, one in self._held_on_host().items() if piece.layer in layers}
            held |= self._held() | {piece: (None, one.newest()) for piece, one in on_host.items()}
        if self._step != step and not held:
            raise JobError(f"rank {self._rank} stands at step {self._step}: it cannot save step {step}")
        assert self._source is not None
        made_of = {
            layer: [one for one in sources if one.layer == layer]
            for layer in layers
            if Piece(layer) not in held
        }
        lacking = [one for parts in made_of.values() for one in parts if one.piece not in held]
        held |= {piece: (None, state) for piece, state in self._source.fetch(lacking, step).items()}
        for layer in layers:
            pieces = [one.piece for one in made_of[layer]] if layer in made_of else [Piece(layer)]
            states = [held[piece][1] for piece in pieces]
            copies.append(host_copy(states[0] if len(states) == 1 else whole_of(states)))
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
        scale = self._loss_scale if self._step == step else self._snapshots.loss_scale(step)
        if scales_loss(self._config.precision) and scale is None:
            raise JobError(
                f"rank {self._rank} does not know the loss scale after step {step}: {folder} is not whole"
            )
        files = {record.name: record for record in records}
        try:
            seal(self._config, self._definition.names, plan, folder, step, generation, files, scale)
        except OSError as error:
            raise JobError(f"could not complete {folder}: {error.strerror or error}") from error

    def _take_over(self, training: Training) -> None:
        """Keep what outlives a generation."""
        self._step, self._left, self._began = training.step, training.left, training.began
        self._loss_scale = training.loss_scale
        if training.vector is not None:
            self._vector = training.vector

    def _keep_offered(self, step: int, states: Iterable[LayerState]) -> None:
        if self._server is not None:
            self._server.keep(step, states)

    def _let_go(self, step: int) -> None:
        if self._server is not None:
            self._server.let_go(step)

    def _withdraw(self) -> None:
        if self._server is not None:
            self._server.withdraw()

    def _busy(self) -> bool:
        return self._channel is not None and self._channel.sending()

    def _offer(self, held: Held, on_host: Mapping[Piece, HostCopy]) -> None:
        """Offer layers as they are; copies in host memory are brought up to date for whoever asks for them."""
        if self._server is not None and held:
            self._server.offer(self._step, [state for _, state in held.values()])
        if self._server is not None and on_host:
            self._server.offer_to_make(self._step, {piece: one.newest for piece, one in on_host.items()})

    def profile(self, budget_s: float = BUDGET_S) -> Measured:
        """Measure layers, links and commit, instead of following a plan. All members of the generation call
        it together.

        Args:
            budget_s: how long to measure the layers.

        Raises:
            ChannelError: another rank is gone, or `leave` was called.
            JobError: a layer fails.
        """
        assert self._channel is not None
        subject = Subject(
            config=self._config,
            rank=self._rank,
            definition=self._definition,
            data=self._data,
            device=self._device,
            optimizer=self._optimizer,
            channel=self._channel,
            compiler=self._compiler,
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

    def prepare_plan(self, plan: Plan, program: RankProgram, held: Arrivals = ()) -> None:
        """Prepare another pipeline plan.

        This rank is ready to follow it once it has every layer, or shard, of its part, as owner or as an up-to-date
        copy, and a module for it. It says so in each commit; after the first commit in which every rank is ready, all
        follow the plan and report `SwitchReport`. A new generation voids it.

        Args:
            program: this rank's part of the plan's schedule.
            held: layers, or shards, whose updates are held back under this plan, and their destinations;
                see `workers.elastic.held_updates`.

        Raises:
            JobError: it is not newer than the plan in force, needs another generation, or cannot be followed with
                these layers.
        """
        if self._assignment is None:
            raise JobError(f"rank {self._rank} follows no plan yet, so that none can take its place")
        check_next(plan, program, self._assignment.plan, self._assignment.place)
        self._check_shares(plan, self._layers)
        self._mailbox.prepare_plan(NextPlan(plan, program, tuple(held)))

    def _check_shares(self, plan: Plan, layers: Built) -> None:
        """Raises:
        JobError: the plan divides replicas, now or with fewer pipelines, and a layer's buffers need a replica's
            microbatches one after the other.
        """
        buffered = [layer.name for layer, state in layers.values() if state.buffers]
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
        with self._leaving:
            self._over = max(self._over, generation)
            if generation and self._generation is not None and self._generation.number > generation:
                return
        if self._source is not None:
            self._source.stop()
        if self._joining is not None:
            self._joining.leave()
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """Leave, and stop hosting the store.

        After successful training, call it only once all ranks have returned from `train`: the last collective
        may still be running at a neighbour.
        """
        self.leave()
        self._channel = None
        self._store = None
        self._snapshots.stop()
        self.faults.close()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._compiler is not None:
            self._compiler.close()


def _held(built: Built) -> Held:
    return {Piece(layer, one[1].shard): one for layer, one in built.items()}


def _haul_of(ahead: Held) -> Haul:
    """What was copied ahead, as if it had been fetched."""
    whole: Built = {}
    pieces: dict[Piece, LayerState] = {}
    for piece, (layer, state) in ahead.items():
        if layer is not None and piece.shard == WHOLE:
            whole[piece.layer] = (layer, state)
        else:
            pieces[piece] = state
    return Haul(whole=whole, pieces=pieces)


def _live(held: Held, piece: Piece) -> tuple[Layer, LayerState] | None:
    """The layer that computes with `piece` here, and its state; None if there is none."""
    layer, state = held.get(piece, (None, None))
    return None if layer is None or state is None else (layer, state)


def _bases(copied: Iterable[Piece], held: Held, host: HostForm | None) -> dict[Piece, Base]:
    """Those of `copied` that are here. A state that arrived from others has no buffers to update: its base comes from
    its owner, like those that are not here."""
    found: dict[Piece, Base] = {}
    for piece in copied:
        layer, state = held.get(piece, (None, None))
        if state is None:
            continue
        flat = bool(state.flats) or not state.updates
        if piece.shard == WHOLE and layer is not None:
            found[piece] = (layer, state)
        elif flat and host is not None:
            with suppress(MemoryError):
                host.check_room(bytes_of(state))
                found[piece] = (None, state if layer is None and in_host_memory(state) else host_copy(state))
        elif flat and piece.shard != WHOLE:
            # That of a live shard is part of the buffer that its module computes with.
            found[piece] = (None, state if layer is None else apart(state))
    return found


def _begun(
    owned: Sequence[int], copied: Sequence[Piece], make: Callable[..., Built], host: HostForm | None
) -> tuple[Built, dict[Piece, Base]]:
    """The layers that it owns and the bases of its copies, as `make` builds layers. Copies of shards, and those in
    host memory, one by one: their modules go at once. What the host has no room for is left out: it is to come from its
    owner, and if there is no room then either, the rank says so."""
    if host is not None:
        return make(owned), _begun_on_host(copied, make, host)
    whole = [piece.layer for piece in copied if piece.shard == WHOLE]
    built = make([*owned, *whole])
    bases: dict[Piece, Base] = {Piece(layer): built[layer] for layer in whole}
    for piece in copied:
        if piece.shard != WHOLE:
            bases[piece] = base_of(make([piece.layer], shard=piece.shard)[piece.layer])
    return {layer: built[layer] for layer in owned}, bases


def _begun_on_host(copied: Sequence[Piece], make: Callable[..., Built], host: HostForm) -> dict[Piece, Base]:
    bases: dict[Piece, Base] = {}
    largest_bytes = 0
    for piece in copied:
        try:
            host.check_room(largest_bytes)
        except MemoryError:
            break
        built = make([piece.layer], shard=piece.shard, on_host=True)[piece.layer]
        bases[piece] = base_of(built, on_host=True)
        largest_bytes = max(largest_bytes, bytes_of(built[1]))
    return bases
