"""One rank, from configuration to outcome. No Ray here: it runs in an actor, a process or a thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

from planner.arrivals import Arrivals
from planner.freezing import FreezePlan
from planner.observed import StepTimes
from planner.plan import Plan
from planner.rank_program import RankProgram
from planner.shards import Piece
from workers.checkpoint.corruption import corrupt_newest_checkpoint
from workers.checkpoint.manifest import FileRecord
from workers.checkpoint.saving import CheckpointSaver
from workers.commit.last_commit import LastCommit
from workers.commit.next_plan import NextPlan, check_buffers, check_next
from workers.config import WorkerConfig
from workers.control.activity import Activity
from workers.control.mailbox import Mailbox
from workers.control.records_digest import vector_sha256
from workers.control.rescues import Rescues
from workers.copies.host_copies import HostForm
from workers.elastic.coming_place import ComingPlace
from workers.elastic.holdings import Holdings
from workers.elastic.layer_source import LayerSource
from workers.elastic.rank_place import RankPlace
from workers.fault_injection.points import FaultPoints
from workers.freezing.plans import check_plan
from workers.layer_check.check import LayerCheck
from workers.process.cores import pin_to_core
from workers.process.host_memory import free_host_bytes, keep_freed_pages
from workers.process.name_lookups import keep_lookups_short
from workers.profiling.measured import Measured
from workers.profiling.profiler import BUDGET_S, ProfiledJob, measure
from workers.protocol.errors import DamagedCheckpoint, JobError
from workers.protocol.orders import Assignment, CommitOutcome, CopyAhead, Generation, Request, StateSource
from workers.protocol.reports import Outcome, Parted, RankPosition, Report, WarningReport, Working
from workers.reproducibility import determinism
from workers.state_stream.stream import StateServer
from workers.step.across_generations import RankTraining
from workers.step.equipment import equip
from workers.transport.channel import Channel
from workers.transport.membership import ChannelMembership


class Rank:
    """One rank of a job.

    Call `setup`, then for each generation `follow`, `join` and `train` in this order. After training that
    ended with a failure or as `Parted`, call `position` and `finish_commit` before the next generation, and
    `records` in between if other ranks need them. `request`, `prepare`, `working` and `leave` may be called from any
    thread.

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
        self._secret = secret
        self._host = host
        self._mailbox = Mailbox()
        self._activity = Activity()
        self._membership = ChannelMembership(rank)
        self._commit = LastCommit()
        self._holdings = Holdings(rank, self._commit, self._warn)
        self._source: LayerSource | None = None
        self._closing = ExitStack()
        self.faults = FaultPoints(
            report,
            rank=rank,
            allowed=config.elastic.allow_faults,
            sever=self.leave,
            corrupt=partial(corrupt_newest_checkpoint, config.job.folder),
        )

    def setup(self) -> None:
        """Fix core, threads and kernels, resolve the model definition, open the data, and serve layers to other
        ranks. The thread that calls it is the one that trains.

        Raises:
            JobError: the factory, the data or the device is not usable, or no core can be fixed.
        """
        config = self._config
        if config.cluster.pin_cores:
            pin_to_core(self._rank)
        determinism.fix(threads=config.job.threads, cuda=config.device == "cuda")
        keep_freed_pages()
        keep_lookups_short()
        has = self._equipment = equip(
            config,
            self._rank,
            self._host,
            secret=self._secret,
            mailbox=self._mailbox,
            activity=self._activity,
            faults=self.faults,
            rescues=self._rescues,
            report=self._report,
            log_sha256=self._log_sha256,
            observe=self._observe,
            closing=self._closing,
        )
        secret, optimizer, device = self._secret, has.optimizer, has.device
        source = LayerSource(config, has.definition, device, optimizer, secret, self.faults, has.compiler)
        self._coming = ComingPlace(
            rank=self._rank,
            source=source,
            membership=self._membership,
            freeze=config.freeze,
            optimizer=optimizer,
            secret=secret,
            report=self._report,
        )
        self._closing.callback(self._coming.close)
        host_form = None
        if config.elastic.copies_on_host(config.device):
            host_form = HostForm(
                device=device.torch_device,
                every=config.elastic.refresh_every,
                build=source.build_copy,
                free_bytes=free_host_bytes,
            )
        if secret:
            busy = self._membership.sending
            server = StateServer(secret, self._host, busy=busy, followers=has.followers, rows=has.kept)
            self._holdings.serve_with(server)
        self._source = source
        self._place = RankPlace(
            config=config,
            optimizer=optimizer,
            commit=self._commit,
            holdings=self._holdings,
            source=source,
            coming=self._coming,
            host_form=host_form,
        )
        self._training = RankTraining(has, self._place, self.leave)
        self._saving = CheckpointSaver(
            config=config,
            rank=self._rank,
            names=has.definition.names,
            faults=self.faults,
            copies=partial(self._holdings.copies, fetch=source.fetch, complete=source.completed),
            carried=self._holdings.carried,
            validations=lambda: self._commit.validations,
            log_sha256=self._log_sha256,
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
        place = self._place
        place.begin(assignment)
        self._training.recover(keep=not place.leaves_step(assignment))
        damage = place.accept(assignment)
        if damage is None:
            self._training.forget()
        return damage

    def copy_ahead(self, order: CopyAhead) -> None:
        """Copy layers of its coming place while others train; see `ComingPlace.follow`."""
        self._coming.follow(order)

    def host_store(self, host: str = "127.0.0.1") -> int:
        """Host the store through which a generation forms, on the interface of `host`; returns its port."""
        return self._membership.host_store(host)

    def join(self, generation: Generation, channel: Channel | None = None) -> None:
        """Form the generation's process group; waits for all its members. Threads of one process pass a
        `channel`."""
        self.leave()
        self._mailbox.void()
        self._membership.join(generation, self._equipment.device.torch_device, channel)

    def train(self) -> Outcome | Parted:
        """Train until the last step, a STOP or a REGROUP; blocks, and streams reports.

        Raises:
            RankOutOfMemory: this rank has not enough memory for the step.
            ChannelError: another rank is gone, or `leave` was called.
        """
        generation, channel = self._membership.generation, self._membership.channel
        assert generation is not None
        assert channel is not None
        return self._training.run(generation, channel)

    def _warn(self, text: str) -> None:
        self._report(WarningReport(rank=self._rank, text=text))

    def working(self) -> Working | None:
        """The action that it is computing; None: it waits for other ranks, or does something else."""
        return self._activity.working()

    def position(self) -> RankPosition:
        """Its position, once it no longer trains: the next try to form a generation begins with it.

        Raises:
            RuntimeError: an update broke off, so its layers are of no step.
        """
        commit = self._commit
        if self._training.torn:
            raise RuntimeError(f"rank {self._rank}: an update broke off in its middle; its layers are lost")
        self._holdings.begin_try()
        return RankPosition(
            rank=self._rank,
            step=commit.step,
            vector_sha256=None if commit.vector is None else vector_sha256(commit.vector),
            undecided=self._training.undecided,
            began=self._training.began,
            holds=self._holdings.pieces(),
            weights=tuple(sorted(self._holdings.weights_only())),
            freeze_plans=self._place.freeze_plans.known,
            carried=commit.carried,
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

    def finish_commit(self, commit_outcome: CommitOutcome) -> None:
        """Apply or drop the undecided commit, and offer the layers of the step that it leads to.

        A rank that ends at another step holds nothing useful; it fetches all its layers from other ranks.
        """
        self._training.finish_commit(commit_outcome)
        if self._commit.step == commit_outcome.step:
            self._holdings.offer()
            self._holdings.offer_weights_only()

    def save(
        self, folder: str, step: int, layers: Sequence[int], sources: Sequence[StateSource] = ()
    ) -> tuple[FileRecord, ...]:
        """Write layers into a checkpoint while it does not train; see `CheckpointSaver.save`."""
        return self._saving.save(folder, step, layers, sources)

    def seal(
        self, folder: str, step: int, plan: Plan, generation: int, records: Sequence[FileRecord]
    ) -> None:
        """Complete that checkpoint; see `CheckpointSaver.seal`."""
        self._saving.seal(folder, step, plan, generation, records)

    def profile(self, budget_s: float = BUDGET_S) -> Measured:
        """Measure layers, links and commit, instead of following a plan. All members of the generation call
        it together.

        Args:
            budget_s: how long to measure the layers.

        Raises:
            ChannelError: another rank is gone, or `leave` was called.
            JobError: a layer fails.
        """
        has, channel = self._equipment, self._membership.channel
        assert channel is not None
        subject = ProfiledJob(
            config=self._config,
            rank=self._rank,
            definition=has.definition,
            data=has.data,
            device=has.device,
            optimizer=has.optimizer,
            channel=channel,
            host=self._host,
            compiler=has.compiler,
            check=LayerCheck(lambda text: None, self._config.job.precision),
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
        layers = len(self._equipment.definition.layers)
        check_plan(plan, self._config.freeze, layers, self._config.microbatches)
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
                see `workers.copies.held_updates`.
            building: what this rank will own in the next generation and has no module for: it builds that beside
                training, and says with `StandbyReport.built` once it is there.

        Raises:
            JobError: it is not newer than the plan in force, needs another generation, or cannot be followed with
                these layers.
        """
        with self._membership.lasting(generation) as lasts:
            if not lasts:
                return
            assignment = self._place.assignment
            if assignment is None:
                raise JobError(f"rank {self._rank} follows no plan yet, so that none can take its place")
            check_next(plan, program, assignment.plan, assignment.place)
            check_buffers(plan, (state for _, state in self._holdings.layers.values()))
            newest = self._mailbox.prepare_plan(NextPlan(plan, program, tuple(held)))
            if newest:
                self._coming.modules.ready(building)

    def leave(self, generation: int = 0) -> None:
        """Drop the process group. Every call waiting in it, here or at a neighbour, raises; so do calls here
        that wait to join a group or for layers or kept activations of other ranks.

        Args:
            generation: this generation and earlier ones are over: a later `join` of them raises. A rank in a
                newer one stays there.
        """
        if not self._membership.end(generation):
            return
        if self._source is not None:
            self._source.stop()
            self._equipment.kept.stop_asking()
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
        self._closing.close()
