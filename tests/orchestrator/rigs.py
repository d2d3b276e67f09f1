"""What tests change in a rank's process before it serves: functions of the rank's number.

Each rank's process imports this module to find its rig. So it imports neither pytest nor the orchestrator,
which would cost every rank another second at startup.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from planner.shards import Piece
from workers.devices.device import CpuDevice
from workers.elastic.copies_ahead import CopiesAhead
from workers.elastic.followed import Followed
from workers.elastic.layer_source import Built, LayerSource
from workers.layers.layer import Layer
from workers.protocol.errors import ChannelError, DamagedCheckpoint
from workers.protocol.orders import Assignment, CommitOutcome
from workers.rank import Rank
from workers.state.layer_state import LayerState
from workers.state_stream.following import Parcels
from workers.state_stream.sending import Delivery
from workers.step.engine import Engine
from workers.transport.channel import MessageStream
from workers.transport.process_group import ProcessGroupChannel

TORN_MESSAGE = 6
"""The first of its large messages in which `dies_sending` kills a rank; one that slips through is followed by more."""
LARGE = 1_000_000
"""Scalars of a large message, at least."""
BEGUN_BYTES = 100_000
PATIENCE_S = 2.0
MEMORY_BYTES = 20_000_000
"""What a device of `memory_falls` has."""


def all_gather_or_none(rank: int) -> None:
    """No rank returns from a gather before all have its result."""
    gather = ProcessGroupChannel.all_gather

    def twice(self: ProcessGroupChannel, record: bytes) -> list[bytes]:
        records = gather(self, record)
        with suppress(ChannelError):
            gather(self, b"")
        return records

    ProcessGroupChannel.all_gather = twice


def memory_falls(rank: int) -> None:
    """A neighbour of rank 1 takes nearly all of its device's memory in step 4."""
    run, step_now = Engine.run, 0

    def counting(self: Engine, step: int, *rest: Any, **named: Any) -> Any:
        nonlocal step_now
        step_now = step + 1
        return run(self, step, *rest, **named)

    Engine.run = counting
    CpuDevice.total_bytes = lambda self: MEMORY_BYTES
    CpuDevice.free_bytes = lambda self: 100_000 if rank == 1 and step_now >= 4 else MEMORY_BYTES // 2


def builds_slowly(rank: int) -> None:
    """A module that is built beside training takes several steps."""
    module = LayerSource.module

    def slow(self: LayerSource, piece: Piece) -> Layer:
        time.sleep(0.2)
        return module(self, piece)

    LayerSource.module = slow


def builds_nothing_while_ranks_wait(rank: int) -> None:
    """A rank that builds a layer between two generations fails."""
    follow, built, waiting = Rank.follow, LayerSource._built, threading.local()

    def following(self: Rank, assignment: Assignment) -> DamagedCheckpoint | None:
        waiting.here = assignment.step > 0
        try:
            return follow(self, assignment)
        finally:
            waiting.here = False

    def building(self: LayerSource, layers: Iterable[int], *rest: Any, **named: Any) -> Built:
        layers = [*layers]
        assert not (layers and getattr(waiting, "here", False)), f"layers {layers} are built while ranks wait"
        return built(self, layers, *rest, **named)

    Rank.follow, LayerSource._built = following, building


def never_settles(rank: int) -> None:
    """Rank 2 blocks for ever in the call that tells it the outcome of a step."""

    def wait_for_ever(self: Rank, commit_outcome: CommitOutcome) -> None:
        threading.Event().wait()

    if rank == 2:
        Rank.finish_commit = wait_for_ever


def hangs_in_step_4(rank: int) -> None:
    """Whichever rank holds the first stage computes for ever in its first action of step 4."""
    execute = Engine._execute

    def hang(self: Engine, action: object, step: int, *rest: object, **named: object) -> None:
        while step == 3 and self._program.rank == 0:
            pass
        execute(self, action, step, *rest, **named)  # pyright: ignore[reportArgumentType]

    Engine._execute = hang  # pyright: ignore[reportAttributeAccessIssue]


def dies_before_its_moments(rank: int) -> None:
    """Rank 1 sends the weights of its layers and is killed before the first of their moments."""
    _dies_when_it_gives(rank, lambda state: not state.weights)


def dies_before_its_last_layer(rank: int) -> None:
    """Rank 1 is killed when it is about to send the model's last layer."""
    _dies_when_it_gives(rank, lambda state: state.layer == 5)


def dies_sending(rank: int) -> None:
    """Rank 1 dies once the network has accepted part of one large message."""
    if rank != 1:
        return
    send, sent = ProcessGroupChannel.send, 0

    def torn(self: ProcessGroupChannel, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        nonlocal sent
        send(self, stream, tensors)
        sent += tensors[0].numel() >= LARGE
        deadline_s = time.monotonic() + PATIENCE_S
        while sent >= TORN_MESSAGE and time.monotonic() < deadline_s:
            self.sending()
            if max(queue.unacknowledged for queue in self._queues._queues) > BEGUN_BYTES:
                os.kill(os.getpid(), signal.SIGKILL)

    ProcessGroupChannel.send = torn


def dies_before_the_decision(rank: int, folder: Path) -> None:
    """The first owner whose gradients a newcomer follows is killed once it has them, before the commit's decision: the
    owner's own record is still missing.

    Files in `folder` tell what happened: `killed` has the owner and its step; `applied` a line for each change that a
    newcomer applied, with the generation and the step.
    """
    send, of_state, take = Followed.send, Parcels.of_state, CopiesAhead._take

    def arrived(step: int, layers: Sequence[int]) -> Path:
        return folder / f"parcels of step {step}, layers {sorted(layers)}"

    def noting(step: int, state: LayerState) -> Parcels:
        parcels = of_state(step, state)
        arrived(step, [*parcels.of_layers]).touch()
        return parcels

    def last(self: Followed, step: int, *rest: Any) -> None:
        layers = self._followers.layers
        send(self, step, *rest)
        if not layers:
            return
        deadline_s = time.monotonic() + 10 * PATIENCE_S
        while not arrived(step, [*layers]).exists() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if arrived(step, [*layers]).exists():
            with suppress(FileExistsError), (folder / "killed").open("x") as file:
                file.write(f"{rank} {step}")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    def taking(self: CopiesAhead, *given: Any) -> bool:
        goes_on = take(self, *given)
        with (folder / "applied").open("a") as file:
            file.write(f"{self.generation} {given[2].step}\n")
        return goes_on

    Followed.send = last
    Parcels.of_state = staticmethod(noting)
    CopiesAhead._take = taking


def _dies_when_it_gives(rank: int, what: Callable[[LayerState], bool]) -> None:
    deliver = Delivery.deliver

    def last(self: Delivery, state: LayerState, step: int) -> None:
        if rank == 1 and what(state):
            os.kill(os.getpid(), signal.SIGKILL)
        deliver(self, state, step)

    Delivery.deliver = last
