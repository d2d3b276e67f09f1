"""Neighbours of a stage, each a program that keeps one part of the machine busy until its input is closed.

    python -m workers.interference.neighbours KIND LEVEL [CORE]

Without torch, so that one starts in a moment. `light` is one process that works half of the time; `heavy` one process
per core that never rests. On one core alone, `heavy` is `PINNED` processes there: what else runs on it keeps a third.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

KINDS = ("compute", "memory", "cache", "network", "disk")
LEVELS = ("light", "heavy")
SLICE_S = 0.05
"""A light neighbour works and rests for this long, in turn."""
PINNED = 2
"""Processes of a heavy neighbour that stays on one core."""
STREAMED_BYTES = 1 << 27
"""More than any cache holds."""
CACHED_BYTES = 1 << 24
"""About as much as the last cache holds."""
WRITTEN_BYTES = 1 << 24

Work = Callable[[], None]
"""A few milliseconds of work."""


@contextmanager
def beside(kind: str, level: str, core: int | None = None) -> Iterator[None]:
    """Run a neighbour while the block runs; it has begun to work when the block begins.

    Args:
        core: the only core that it uses; None: any.

    Raises:
        ValueError: there is no such neighbour.
        RuntimeError: it did not begin.
    """
    if kind not in KINDS or level not in LEVELS:
        raise ValueError(f"no neighbour {kind} {level}: the kinds are {', '.join(KINDS)}, light or heavy")
    command = [sys.executable, "-m", "workers.interference.neighbours", kind, level]
    command += [] if core is None else [str(core)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # In a process group of its own: Ctrl-C is for the caller, and the neighbour ends when its input does.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"works\n":
                raise RuntimeError(f"the neighbour {kind} {level} ended before it began to work")
            yield
        finally:
            process.stdin.close()  # which ends it
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()


def work_of(kind: str) -> Work:
    """The work of a neighbour, ready to be called again and again."""
    return {"compute": _compute, "memory": _memory, "cache": _cache, "network": _network, "disk": _disk}[
        kind
    ]()


def _compute() -> Work:
    left = np.random.default_rng(0).random((96, 96))

    def multiply() -> None:
        for _ in range(20):
            np.dot(left, left)

    return multiply


def _memory() -> Work:
    source = np.ones(STREAMED_BYTES // 8)
    target = np.empty_like(source)
    part = len(source) // 16
    place = 0

    def stream() -> None:
        nonlocal place
        target[place : place + part] = source[place : place + part]
        place = (place + part) % (part * 16)

    return stream


def _cache() -> Work:
    values = np.ones(CACHED_BYTES // 8)
    places = np.random.default_rng(0).integers(0, len(values), size=1 << 17)
    return lambda: values.__setitem__(places, values[places[::-1]])


def _network() -> Work:
    ours, theirs = socket.socketpair() if not hasattr(socket, "AF_INET") else _connected()
    data = bytes(1 << 20)

    def drain() -> None:
        while theirs.recv(1 << 18):
            pass

    threading.Thread(target=drain, daemon=True).start()
    return lambda: ours.sendall(data)


def _connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def _disk() -> Work:
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
    data = bytes(WRITTEN_BYTES)

    def write() -> None:
        file.seek(0)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

    return write


def _run(kind: str, light: bool, ended: Callable[[], bool]) -> None:
    work = work_of(kind)
    while not ended():
        until_s = time.monotonic() + SLICE_S
        while time.monotonic() < until_s:
            work()
        if light:
            time.sleep(SLICE_S)


def _beyond_parent(kind: str) -> None:
    parent = os.getppid()
    _run(kind, light=False, ended=lambda: os.getppid() != parent)


def main() -> None:
    kind, level, *core = sys.argv[1:]
    processes = os.cpu_count() or 1
    if core:
        os.sched_setaffinity(0, {int(core[0])})
        processes = PINNED
    more = processes - 1 if level == "heavy" else 0
    others = [
        multiprocessing.get_context("fork").Process(target=_beyond_parent, args=(kind,), daemon=True)
        for _ in range(more)
    ]
    for other in others:
        other.start()
    work_of(kind)()
    print("works", flush=True)
    _run(kind, level == "light", lambda: bool(select.select([sys.stdin], [], [], 0)[0]))
    for other in others:
        other.kill()
        other.join()


if __name__ == "__main__":
    main()
