"""State streams within one process: servers, fetches, a proxy between them, and states to send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pace import patient
from torch import Tensor

from workers.state.layer_state import LayerState
from workers.state_stream.flow import Flow
from workers.state_stream.following import Followers
from workers.state_stream.stream import StateServer, fetch

SECRET = b"the job's secret"
HOST = "127.0.0.1"
SMALL = Flow(chunk_bytes=1000, chunks_ahead=2)
LIVELY = Flow(chunk_bytes=1000, chunks_ahead=2, sign_of_life_s=0.002)
FLOWS = [
    pytest.param(Flow(chunk_bytes=1000, chunks_ahead=2, pipelined=p, prioritized=q), id=f"{name}{tag}")
    for p, name in ((True, "pipelined"), (False, "whole"))
    for q, tag in ((True, ", prioritized"), (False, ""))
]


def rich_state(layer: int = 3, seed: int = 0) -> LayerState:
    """A state with one of everything: dtypes, no elements, no dimensions, other strides, sparse groups."""
    torch.manual_seed(seed)
    floats = torch.randn(17, 23)
    floats[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    return LayerState(
        layer=layer,
        name="block.ünïcode",
        weights={
            "z.last": floats,
            "a.first": torch.randn(3001).bfloat16(),
            "scalar": torch.tensor(0.5),
            "none": torch.empty(0, 4),
            "transposed": torch.randn(5, 40).t(),
            "double": torch.randn(7, dtype=torch.float64),
            "half": torch.randn(9).half(),
        },
        buffers={
            "count": torch.tensor(2**53 + 1),
            "mask": torch.tensor([True, False, True]),
            "bytes": torch.arange(250, dtype=torch.uint8),
            "complex": torch.randn(4, dtype=torch.complex64),
            "nothing": torch.empty(0, dtype=torch.int32),
        },
        slots={
            "z.last": {"exp_avg": torch.randn(17, 23), "exp_avg_sq": torch.rand(17, 23)},
            "none": {"exp_avg": torch.empty(0, 4)},
            "scalar": {},
        },
        updates={"z.last": 12345678901, "a.first": 0, "scalar": 7},
        freezing={"apf.moment": torch.randn(1100), "settled": torch.zeros(2, dtype=torch.bool)},
    )


def bits(state: LayerState) -> dict[str, Any]:
    """All contents of a state, including their order, as comparable values."""

    def of(tensors: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        return [
            (
                name,
                str(t.dtype),
                tuple(t.shape),
                t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"",
            )
            for name, t in tensors.items()
        ]

    return {
        "layer": state.layer,
        "name": state.name,
        "weights": of(state.weights),
        "buffers": of(state.buffers),
        "freezing": of(state.freezing),
        "slots": [(name, of(slots)) for name, slots in state.slots.items()],
        "updates": list(state.updates.items()),
    }


@dataclass
class Server:
    """A server and its log."""

    server: StateServer
    log: list[str] = field(default_factory=list)

    def fetch(self, layer: int = 3, step: int = 17, **options: Any) -> LayerState:
        return fetch(HOST, self.server.port, SECRET, layer, step, **{"wait_s": 5.0, "flow": SMALL} | options)


@contextmanager
def serving(
    busy: Callable[[], bool] = lambda: False, flow: Flow = SMALL, followers: Followers | None = None
) -> Iterator[Server]:
    """A server that leaves no thread and no open port behind."""
    log: list[str] = []
    server = StateServer(SECRET, HOST, busy=busy, log=log.append, flow=flow, followers=followers)
    try:
        yield Server(server, log)
    finally:
        server.close()
        assert [t.name for t in threading.enumerate() if t.name.startswith("state")] == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, server.port), 1)


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(60)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@contextmanager
def fetching(take: Callable[[], object]) -> Iterator[list[object]]:
    """Run `take()` in a thread; the list receives what it returns or raises."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(take())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield got
    thread.join(60)
    assert not thread.is_alive()


@contextmanager
def between(to: Server, change: Callable[[int, bytes], bytes]) -> Iterator[int]:
    """The port of a proxy that passes everything the server sends through `change(bytes before, piece)`."""
    with closing(socket.create_server((HOST, 0))) as listener:

        def back(server: socket.socket, client: socket.socket) -> None:
            seen = 0
            with suppress(OSError):
                while piece := server.recv(1 << 16):
                    client.sendall(change(seen, piece))
                    seen += len(piece)
                client.shutdown(socket.SHUT_RDWR)

        def forth() -> None:
            client, _ = listener.accept()
            server = socket.create_connection((HOST, to.server.port), 5)
            with client, server:
                thread = threading.Thread(target=back, args=(server, client))
                thread.start()
                with suppress(OSError):
                    while piece := client.recv(1 << 16):
                        server.sendall(piece)
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                thread.join()

        thread = threading.Thread(target=forth)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()
