"""Two network namespaces joined by a link of a given rate, like two machines on a network. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "link0"
"""The name of each end in its own namespace."""


class ShapedLink:
    """A context manager that creates the link, and on exit removes it and kills every process started on it.

    Args:
        mbit_per_s: rate of each direction.
        bands: whether waiting packets queue by priority, as in Linux's default queue (`pfifo_fast`), or all
            in one queue.
    """

    def __init__(self, mbit_per_s: float, *, bands: bool = True) -> None:
        self._mbit_per_s = mbit_per_s
        self._bands = bands
        self._names = tuple(f"freshet-{os.getpid()}-{side}" for side in range(2))
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> ShapedLink:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._remove()

    def start(self, side: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on one side of the link."""
        process = subprocess.Popen(["ip", "netns", "exec", self._names[side], *command], **options)
        self._processes.append(process)
        return process

    def _make(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
        near, far = self._names
        _run(
            *("ip", "-n", near, "link", "add", INTERFACE, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", far),
        )
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            shape = ("rate", f"{self._mbit_per_s}mbit", "burst", "16kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "tbf", *shape)
            if self._bands:
                queue = ("parent", "1:1", "handle", "2:", "pfifo_fast")
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *queue)

    def _remove(self) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
