"""A message of which only a part arrives: neither its receiver nor its sender waits for the rest."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from state_streams import eventually
from test_state_stream_kills import process
from test_transport_process_group import generation_of
from torch import Tensor

from workers.protocol.errors import ChannelError
from workers.protocol.orders import Generation
from workers.transport.channel import MessageStream
from workers.transport.process_group import ProcessGroupChannel

THERE, BACK = MessageStream(0, 1, 2, "forward stage 0 -> 1"), MessageStream(1, 0, 3, "backward stage 1 -> 0")
NUMBERS = 32_000_000
"""Numbers in a message: 128 MB, which no socket buffers at once."""
TIMEOUT_S = 60.0


def peer(generation: Generation, sends: bool, pipe: Connection) -> None:
    """Rank 0: it sends messages on command, or receives one message and stops in the middle of the next."""
    channel = ProcessGroupChannel(generation, 0, torch.device("cpu"))
    message = torch.ones(NUMBERS)
    if sends:
        while True:
            channel.send(THERE, (message,))
            pipe.recv()
    else:
        channel.receive(BACK)
        channel.expect(BACK, 1)
        (arriving,) = channel._posted[BACK][0]
        arriving[0] = 0
        pipe.send("posted")
        eventually("it arrives", lambda: bool(arriving[0]))
        os.kill(os.getpid(), signal.SIGSTOP)


def bystander(generation: Generation, pipe: Connection) -> None:
    """Rank 2: it joins and waits."""
    channel = ProcessGroupChannel(generation, 2, torch.device("cpu"))
    pipe.recv()
    channel.close()


@contextmanager
def channel_to(sends: bool, ranks: int = 2) -> Iterator[tuple[ProcessGroupChannel, int, Connection]]:
    """Rank 1's channel to a process, on the host of the store; yields (channel, process id, pipe)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = generation_of(ranks, store, TIMEOUT_S)
    with ExitStack() as stack:
        pid, pipe = stack.enter_context(process(peer, generation, sends))
        for _ in range(2, ranks):
            stack.enter_context(process(bystander, generation))
        channel = ProcessGroupChannel(generation, 1, torch.device("cpu"))
        try:
            yield channel, pid, pipe
        finally:
            channel.close()


def stopped_within(channel: ProcessGroupChannel, pid: int, pipe: Connection) -> Tensor:
    """The part of a message that has arrived when its sender is stopped in the middle of it."""
    (first,) = channel.receive(THERE)
    assert bool((first == 1).all())
    while True:
        channel.expect(THERE, 1)
        ((arriving,),) = channel._posted[THERE]
        arriving[0] = arriving[-1] = 0
        pipe.send("go on")
        eventually("it arrives", lambda arriving=arriving: bool(arriving[0]))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        if not arriving[-1]:
            return arriving
        # The sender was faster, so try again.
        os.kill(pid, signal.SIGCONT)
        channel.receive(THERE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_receiver_learns_at_once_that_the_sender_was_killed(ranks: int) -> None:
    """No rank closes its channel, and others are still connected to the store that the receiver hosts."""
    with channel_to(sends=True, ranks=ranks) as (channel, pid, pipe):
        arriving = stopped_within(channel, pid, pipe)
        os.kill(pid, signal.SIGKILL)
        caught: list[ChannelError] = []

        def receive() -> None:
            with pytest.raises(ChannelError) as error:
                channel.receive(THERE)
            caught.append(error.value)

        receiving = threading.Thread(target=receive)
        receiving.start()
        receiving.join(TIMEOUT_S / 4)
        assert caught, "it waits for the rest"
        assert "a connection to another rank is broken" in str(caught[0])
        assert arriving[0] == 1
        assert arriving[-1] == 0, "all of it had come"


def test_a_receiver_is_woken_by_leaving() -> None:
    with channel_to(sends=True) as (channel, pid, pipe):
        arriving = stopped_within(channel, pid, pipe)
        threading.Timer(0.3, channel.close).start()
        woken = threading.Timer(TIMEOUT_S / 4, os.kill, (pid, signal.SIGCONT))
        woken.start()
        with pytest.raises(ChannelError, match=THERE.name):
            channel.receive(THERE)
        assert woken.is_alive(), "it was not leaving that woke it"
        woken.cancel()
        assert arriving[-1] == 0, "all of it had come"


def test_a_sender_is_woken_by_leaving() -> None:
    with channel_to(sends=False) as (channel, pid, pipe):
        message = torch.ones(NUMBERS)
        channel.send(BACK, (message,))
        assert pipe.recv() == "posted"
        channel.send(BACK, (message,))
        eventually("the receiver stands still", lambda: _state(pid) == "T")
        threading.Timer(0.3, channel.close).start()
        woken = threading.Timer(TIMEOUT_S / 4, os.kill, (pid, signal.SIGCONT))
        woken.start()
        with pytest.raises(ChannelError, match="could not be delivered"):
            channel.flush()
        assert woken.is_alive(), "it was not leaving that woke it"
        woken.cancel()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]
