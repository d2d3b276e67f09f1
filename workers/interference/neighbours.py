"""Neighbours of a stage, each a program that keeps one part of the machine busy until its input is closed.

    python -m workers.interference.neighbours KIND LEVEL DEVICE [CORE ...]

Without torch, so that one starts in a moment; only the kinds that work on a stage's DEVICE need it. `light` is one
process that works half of the time, `steady` one that never rests, `heavy` one per core that never rests. On one core
alone, and on one device, `heavy` is `PINNED` processes there: what else runs on it keeps a third.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier

import numpy as np

LEVELS = ("light", "steady", "heavy")
SLICE_S = 0.02
"""A light neighbour works and rests for this long, in turn."""
PINNED = 2
"""Processes of a heavy neighbour that stays on one core, or on one device."""
BEGINS_S = 60.0
"""Processes of a heavy neighbour of which one begins later than the others by so much do not work."""
STREAMED_BYTES = 1 << 27
"""More than any cache holds."""
CACHED_BYTES = 1 << 24
"""About as much as the last cache holds."""
WRITTEN_BYTES = 1 << 24
MAPPED_BYTES = 1 << 22

Work = Callable[[], object]
"""A few milliseconds of work."""


@contextmanager
def beside(
    kind: str, level: str, cores: Sequence[int] = (), *, accelerator: str | None = None
) -> Iterator[None]:
    """Run a neighbour while the block runs; it has begun to work when the block begins.

    Args:
        cores: the only ones that it uses; empty: any.
        accelerator: torch's name of the device that `DEVICE_KINDS` work on; None: there are only the others.

    Raises:
        ValueError: there is no such neighbour.
        RuntimeError: it did not begin, or did not last.
    """
    if kind in DEVICE_KINDS and accelerator is None:
        raise ValueError(
            f"no neighbour {kind} beside a stage on a CPU: it works on the stage's GPU; choose one of"
            f" {', '.join(KINDS)}, or a stage on CUDA"
        )
    if kind not in (*KINDS, *DEVICE_KINDS) or level not in LEVELS:
        raise ValueError(
            f"no neighbour {kind} {level}: the kinds are {', '.join(KINDS)}, and on CUDA"
            f" {', '.join(DEVICE_KINDS)}; the levels {', '.join(LEVELS)}"
        )
    command = [sys.executable, "-m", "workers.interference.neighbours", kind, level, accelerator or "cpu"]
    command += map(str, cores)
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
            if process.poll() is not None:
                raise RuntimeError(f"the neighbour {kind} {level} ended while it should have worked")
        finally:
            process.stdin.close()  # which ends it
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _compute() -> Work:
    left = np.random.default_rng(0).random((96, 96))

    def multiply() -> None:
        for _ in range(20):
            np.dot(left, left)

    return multiply


def _hashes() -> Work:
    data = bytes(1 << 16)

    def digest() -> None:
        for _ in range(20):
            hashlib.sha256(data).digest()

    return digest


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


def _fill() -> Work:
    target = np.empty(STREAMED_BYTES // 8)
    parts = target.reshape(16, -1)
    order = itertools.cycle(range(len(parts)))
    return lambda: parts[next(order)].fill(1.0)


def _pages() -> Work:
    """The kernel gives pages, and takes them back."""

    def touch() -> None:
        with mmap.mmap(-1, MAPPED_BYTES) as pages:
            for place in range(0, MAPPED_BYTES, mmap.PAGESIZE):
                pages[place] = 1

    return touch


def _cache() -> Work:
    values = np.ones(CACHED_BYTES // 8)
    places = np.random.default_rng(0).integers(0, len(values), size=1 << 17)
    return lambda: values.__setitem__(places, values[places[::-1]])


def _random() -> Work:
    values = np.ones(STREAMED_BYTES // 8)
    places = np.random.default_rng(0).integers(0, len(values), size=1 << 15)
    return lambda: values.take(places)


def _network() -> Work:
    ours, theirs = _connected()
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


def _pipe() -> Work:
    """Two threads wake each other."""
    to_us, from_them = os.pipe()
    to_them, from_us = os.pipe()

    def answer() -> None:
        while data := os.read(to_them, 1):
            os.write(from_them, data)

    threading.Thread(target=answer, daemon=True).start()

    def ask() -> None:
        for _ in range(50):
            os.write(from_us, b".")
            os.read(to_us, 1)

    return ask


def _disk() -> Work:
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
    data = bytes(WRITTEN_BYTES)

    def write() -> None:
        file.seek(0)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

    return write


def _files() -> Work:
    """Small files come and go, in the page cache alone."""
    data = bytes(1 << 14)

    def write() -> None:
        for _ in range(20):
            with tempfile.TemporaryFile() as file:
                file.write(data)

    return write


_WORK: dict[str, Callable[[], Work]] = {
    "compute": _compute,
    "hashes": _hashes,
    "memory": _memory,
    "fill": _fill,
    "pages": _pages,
    "cache": _cache,
    "random": _random,
    "network": _network,
    "pipe": _pipe,
    "disk": _disk,
    "files": _files,
}
"""Kind -> function that sets up a neighbour's work."""
KINDS = tuple(_WORK)
DEVICE_KINDS = ("matmul", "copy")
"""Kinds that work on a stage's own device: functions of `workers.interference.device_work`."""


def _begun(kind: str, device: str, ready: Barrier) -> Work:
    """The neighbour's work, done once, as by all other processes of the neighbour."""
    if kind in DEVICE_KINDS:
        import torch

        from workers.interference import device_work

        work: Work = getattr(device_work, kind)(torch.device(device))
    else:
        work = _WORK[kind]()
    work()
    ready.wait(BEGINS_S)
    return work


def _run(work: Work, light: bool, ended: Callable[[], bool]) -> None:
    while not ended():
        until_s = time.monotonic() + SLICE_S
        while time.monotonic() < until_s:
            work()
        if light:
            time.sleep(SLICE_S)


def _beyond_parent(kind: str, device: str, ready: Barrier) -> None:
    parent = os.getppid()
    _run(_begun(kind, device, ready), light=False, ended=lambda: os.getppid() != parent)


def main() -> None:
    kind, level, device, *cores = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, set(map(int, cores)))
    processes = max(PINNED, len(cores)) if cores else os.cpu_count() or 1
    if kind in DEVICE_KINDS:
        processes = PINNED
    more = processes - 1 if level == "heavy" else 0
    forking = multiprocessing.get_context("fork")
    ready = forking.Barrier(1 + more)
    others = [
        forking.Process(target=_beyond_parent, args=(kind, device, ready), daemon=True) for _ in range(more)
    ]
    for other in others:
        other.start()
    work = _begun(kind, device, ready)
    print("works", flush=True)
    _run(work, level == "light", lambda: bool(select.select([sys.stdin], [], [], 0)[0]))
    for other in others:
        other.kill()
        other.join()


if __name__ == "__main__":
    main()
