"""The same exchange between two processes over each ordered network, NCCL on two GPUs; and the choice."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from serial_backend import serial_channel

from workers.launch.processes import forkserver
from workers.protocol.errors import ChannelError
from workers.protocol.orders import Generation
from workers.transport.channel import Channel, MessageStream
from workers.transport.nccl import NcclBackend
from workers.transport.open_channel import each_has_its_own_gpu, open_channel
from workers.transport.ordered import OrderedChannel
from workers.transport.process_group import ProcessGroupChannel

THERE = MessageStream(0, 1, 2, "forward stage 0 -> 1")
BACK = MessageStream(1, 0, 1, "backward stage 1 -> 0")
GROUPS = [[THERE], [THERE, BACK], [THERE, BACK], [BACK]]
NETWORKS = [
    "serial",
    pytest.param(
        "nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
    ),
]


def open_end(network: str, generation: Generation, rank: int) -> tuple[Channel, torch.device]:
    if network == "serial":
        return serial_channel(generation, rank), torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    channel = open_channel(generation, rank, device)
    assert isinstance(channel, OrderedChannel)
    return channel, device


def question(window: int, number: int, device: torch.device) -> torch.Tensor:
    """A tensor that takes a while to compute, so that a message sent before it is ready would show."""
    x = torch.full((512, 512), float(window + number + 1), device=device)
    for _ in range(8):
        x = x @ torch.eye(512, device=device)
    return x


def trade(network: str, generation: Generation, rank: int, pipe: Connection) -> None:
    channel, device = open_end(network, generation, rank)
    for window in range(3):
        channel.window(GROUPS)
        answers = []
        if rank == 0:
            channel.send(THERE, (question(window, 0, device),))
            for number in range(3):
                if number < 2:
                    channel.send(THERE, (question(window, number + 1, device),))
                answers.append(channel.receive(BACK)[0].sum().item())
        for _ in range(3 * rank):
            (x,) = channel.receive(THERE)
            channel.send(BACK, (x * 2 + 1,))
            del x
        channel.flush()
        pipe.send(answers)
    # The neighbour may still be sending its last messages.
    channel.all_gather(b"")
    pipe.recv()
    channel.close()


def be_told_to_leave(network: str, generation: Generation, rank: int, pipe: Connection) -> None:
    channel, device = open_end(network, generation, rank)
    channel.window(GROUPS)
    if rank == 0:
        channel.send(THERE, (torch.zeros(4, device=device),))
        channel.all_gather(b"")
    else:
        channel.receive(THERE)
        channel.all_gather(b"")
        threading.Timer(0.2, channel.close).start()
        try:
            # A first message may wait for its connection, any other for its group.
            channel.send(BACK, (torch.zeros(4, device=device),))
            channel.receive(THERE)
            channel.flush()
        except ChannelError as error:
            pipe.send(str(error))
    pipe.recv()


@contextmanager
def pair_of(work: Any, network: str) -> Iterator[list[Connection]]:
    """The pipes of two processes that run `work`. At the end each is told to exit and waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = Generation(
        number=1, epoch=1, members=(0, 1), store_host="127.0.0.1", store_port=store.port, timeout_s=60.0
    )
    context: Any = forkserver()
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(network, generation, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
        for pipe in pipes:
            pipe.send("end")
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize("network", NETWORKS)
def test_what_arrives_is_what_was_computed(network: str) -> None:
    with pair_of(trade, network) as pipes:
        for window in range(3):
            expected = [512.0 * 512 * (2 * (window + number + 1) + 1) for number in range(3)]
            assert pipes[0].recv() == expected
            assert pipes[1].recv() == []


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_that_is_told_to_leave_stops_waiting(network: str) -> None:
    with pair_of(be_told_to_leave, network) as pipes:
        assert "60000ms" not in pipes[1].recv()


def test_nccl_is_for_ranks_with_a_gpu_of_their_own() -> None:
    assert each_has_its_own_gpu([b"host GPU-1", b"host GPU-2"])
    assert each_has_its_own_gpu([b"host-1 GPU-1", b"host-2 GPU-1"])
    assert not each_has_its_own_gpu([b"host GPU-1", b"host GPU-2", b"host GPU-1"])
    assert not each_has_its_own_gpu([b"host GPU-1", b""])
    assert not each_has_its_own_gpu([b"host GPU-1"])


def test_ranks_on_the_cpu_use_gloo() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = Generation(
        number=1, epoch=1, members=(0,), store_host="127.0.0.1", store_port=store.port, timeout_s=30.0
    )
    channel = open_channel(generation, 0, torch.device("cpu"))
    assert type(channel) is ProcessGroupChannel
    channel.close()


@pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU with NCCL"
)
def test_a_lost_rank_ends_a_wait_for_nccl_within_milliseconds() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = Generation(
        number=1, epoch=1, members=(0,), store_host="127.0.0.1", store_port=store.port, timeout_s=60.0
    )
    lost: list[bool] = []
    device = torch.device("cuda", 0)
    backend = NcclBackend(generation, 0, device, lambda: bool(lost))
    sent = torch.arange(4, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    backend.finish(backend.issue([(sent, 0)], [(received, 0)]))
    assert received.equal(sent)
    torch.cuda._sleep(10**10)  # some 5 s, for which the message waits
    handle = backend.issue([(sent, 0)], [(received, 0)])
    begun_s = time.monotonic()
    threading.Timer(0.2, lambda: lost.append(True)).start()
    with pytest.raises(RuntimeError, match="a connection to another rank is broken"):
        backend.finish(handle)
    assert 0.19 < time.monotonic() - begun_s < 0.25
    backend.close()
