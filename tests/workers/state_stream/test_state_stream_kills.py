"""Real processes are killed in the middle of a state stream; the other end notices at once and survives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from state_streams import HOST, LIVELY, SECRET, bits, eventually, fetching, rich_state, serving

from workers.launch.processes import forkserver
from workers.state_stream.flow import Flow
from workers.state_stream.frames import PeerGone
from workers.state_stream.stream import StateServer, fetch

FEW = 5
"""Checks of training's traffic before training seems to send for ever; as many frames leave until then."""


class Quiet:
    """Training that is quiet at first, and then sends for ever."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks > FEW


def serve(pipe: Connection) -> None:
    busy = Quiet()
    server = StateServer(SECRET, HOST, busy=busy, flow=Flow(chunk_bytes=1000))
    server.offer(17, [rich_state()])
    pipe.send(server.port)
    eventually("it has begun", lambda: busy.looks > FEW + 5)
    pipe.send("begun")
    threading.Event().wait()


def take(port: int, pipe: Connection) -> None:
    fetch(HOST, port, SECRET, 3, 17, wait_s=5)


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """(process id, pipe) of a process that runs `target(*arguments, pipe)`."""
    context: Any = forkserver()
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child.pid, ours
    finally:
        child.kill()
        child.join()


def listening(port: int) -> set[str]:
    """The sockets (inodes) that listen at `port`: another process may get it as soon as it is free."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[9] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


def test_a_server_that_is_killed_is_gone_at_once() -> None:
    torch.manual_seed(0)
    with process(serve) as (pid, pipe):
        port = pipe.recv()
        its = listening(port)
        assert its
        with fetching(lambda: fetch(HOST, port, SECRET, 3, 17, wait_s=5)) as got:
            assert pipe.recv() == "begun"
            assert got == []
            os.kill(pid, signal.SIGKILL)
            eventually("it fails", lambda: bool(got))
        assert isinstance(got[0], PeerGone)
        assert "silent" not in str(got[0]), "it must not have waited for a time limit"
        assert f"layer 3 of step 17 from {HOST}:{port}" in str(got[0])
        eventually("the system has closed its socket", lambda: not its & listening(port))


def test_a_taker_that_is_killed_costs_the_server_nothing() -> None:
    busy = Quiet()
    with serving(busy=busy, flow=LIVELY) as to:
        to.server.offer(17, [rich_state()])
        with process(take, to.server.port) as (pid, _):
            eventually("it is in the middle", lambda: busy.looks > FEW + 5)
            os.kill(pid, signal.SIGKILL)
            eventually("the server has noticed", lambda: not to.server._peers)
        assert to.log == []
        busy.looks = -1000
        assert bits(to.fetch()) == bits(rich_state())
