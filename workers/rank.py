"""Everything of one rank, from configuration to outcome. No Ray here: an actor, a process and a thread all host it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from planner.ir import Schedule
from planner.plan import Plan
from workers import determinism
from workers.build import build_layers
from workers.checkpoint import DamagedCheckpointError, read_layer, read_manifest
from workers.config import WorkerConfig
from workers.data.dataset import OpenData
from workers.data.registry import open_dataset
from workers.devices.device import Device
from workers.devices.registry import make_device
from workers.host_memory import keep_freed_pages
from workers.layer import Layer
from workers.layer_state import LayerState, load_
from workers.mailbox import Mailbox
from workers.models.definition import ModelDefinition
from workers.models.registry import build_definition
from workers.optim import Optimizer, make_optimizer
from workers.protocol import CheckpointRef, DamagedCheckpoint, Generation, Outcome, Report, Request
from workers.training import Setting, Training
from workers.transport.channel import Channel
from workers.transport.open_channel import open_channel


class Rank:
    """One rank of a job. Call `setup`, `follow`, `join`, `train` in this order; `request` and `leave` from any thread.

    Args:
        rank: the global rank, replica * P + pipeline rank.
        report: takes every report as it comes, on the training thread; must not block.
    """

    def __init__(self, config: WorkerConfig, rank: int, report: Callable[[Report], None]) -> None:
        self._config = config
        self._rank = rank
        self._report = report
        self._mailbox = Mailbox()
        self._store: dist.TCPStore | None = None
        self._channel: Channel | None = None
        self._generation: Generation | None = None
        self._step = 0

    def setup(self) -> None:
        """Fix threads and kernels, resolve the model definition, open the data.

        Raises:
            JobError: the factory, the data or the device is not what it should be.
        """
        config = self._config
        determinism.fix(threads=config.threads, cuda=config.device == "cuda")
        keep_freed_pages()
        self._data: OpenData = open_dataset(config.data, config.model, config.output)
        self._definition: ModelDefinition = build_definition(config.model, self._data.vocabulary)
        self._device: Device = make_device(config, len(self._definition.layers))
        self._optimizer: Optimizer = make_optimizer(config.optimizer, config.steps)
        self._optimizer.check_ties(self._definition.ties)

    def follow(self, plan: Plan, schedule: Schedule, start: CheckpointRef | None) -> DamagedCheckpoint | None:
        """Build the layers that `plan` gives this rank, with initial values or with those of `start`.

        Returns:
            What is wrong with `start`, if it is damaged: call again with an older one.

        Raises:
            JobError: the checkpoint holds another model.
        """
        self._plan, self._schedule = plan, schedule
        self._step = 0
        self._layers: dict[int, tuple[Layer, LayerState]] = build_layers(
            self._definition,
            plan.layers_of_rank(self._rank % plan.pipeline_ranks),
            seed=self._config.seed,
            precision=self._config.precision,
            device=self._device.torch_device,
            optimizer=self._optimizer,
        )
        if start is None:
            return None
        try:
            manifest = read_manifest(start)
            for index, (_, state) in self._layers.items():
                load_(state, read_layer(start, manifest, index))
        except DamagedCheckpointError as error:
            return error.damage
        self._step = start.step
        return None

    def host_store(self, host: str = "127.0.0.1") -> int:
        """Host the store over which a generation forms, on the interface of `host`; returns its port."""
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
        """Form the generation's process group; waits for all its members. Threads of one process bring a `channel`."""
        self._generation = generation
        self._channel = channel or open_channel(generation, self._rank, self._device.torch_device)

    def train(self) -> Outcome:
        """Train until the last step or a STOP; blocks, and streams reports.

        Raises:
            ChannelError: another rank is gone, or `leave` was called.
        """
        assert self._channel is not None
        assert self._generation is not None
        setting = Setting(
            config=self._config,
            rank=self._rank,
            plan=self._plan,
            schedule=self._schedule,
            definition=self._definition,
            data=self._data,
            layers=self._layers,
            optimizer=self._optimizer,
            device=self._device,
            mailbox=self._mailbox,
            report=self._report,
        )
        training = Training(setting, self._generation, self._channel, self._step)
        try:
            return training.run()
        finally:
            self._step = training.step

    def request(self, request: Request) -> None:
        """Drop a request into the mailbox; it takes effect at a commit, on all ranks."""
        self._mailbox.put(request)

    def leave(self) -> None:
        """Drop the process group: whoever waits in it, here or at a neighbour, gets an error."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """Leave, and stop hosting the store. After a training that went well, only when all ranks have returned from
        `train`: the last collective may still be under way at a neighbour."""
        self.leave()
        self._channel = None
        self._store = None
