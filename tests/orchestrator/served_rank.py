"""One rank as a plain process: how it handles calls that come through a pipe.

The process imports this module to find its target. So it imports nothing of the orchestrator, which would
cost each rank another second at startup.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from workers.config import WorkerConfig
from workers.control.rank_error import RankError, travelling_errors
from workers.process.stacks import stacks
from workers.protocol.reports import Outcome, Parted

CONTROL = ("ping", "stacks", "leave", "request", "prepare", "prepare_plan", "copy_ahead", "arm")
"""Calls that must not wait for training."""
SECRET = b"known to this job alone"


class _Served:
    """One rank in its process."""

    def __init__(self, config: WorkerConfig, number: int, pipe: Connection) -> None:
        from workers.rank import Rank

        self._pipe = pipe
        self._turn = threading.Lock()
        self._outcome: Outcome | Parted | None = None
        self._rank = Rank(
            config,
            number,
            lambda report: self._send(("report", report)),
            secret=SECRET,
            observe=lambda observed: self._send(("observed", observed)),
        )

    def _send(self, message: object) -> None:
        with self._turn, suppress(OSError):
            self._pipe.send(message)

    def run(self) -> None:
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(calls,), daemon=True).start()
        while (call := calls.get()) is not None:
            self._answer(*call)
        self._rank.close()

    def _listen(self, calls: queue.SimpleQueue[Any]) -> None:
        while True:
            try:
                call = self._pipe.recv()
            except (EOFError, OSError):
                # The parent process is gone, and no process may stay behind.
                os.kill(os.getpid(), signal.SIGKILL)
                return
            if call is None:
                calls.put(None)
            elif call[1] in CONTROL:
                threading.Thread(target=self._answer, args=call, daemon=True).start()
            else:
                calls.put(call)

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            with travelling_errors(cut_off=method == "join"):
                self._send((number, True, self._call(method, arguments)))
        except RankError as error:
            self._send((number, False, error))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        rank = self._rank
        match method:
            case "setup":
                rank.setup()
                return os.getpid(), rank.port
            case "host_store":
                return "127.0.0.1", rank.host_store()
            case "ping":
                return rank.working()
            case "stacks":
                return stacks()
            case "arm":
                return rank.faults.arm(*arguments)
            case _:
                return getattr(rank, method)(*arguments)


def serve(config: WorkerConfig, number: int, pipe: Connection, rig: Callable[[int], None] | None) -> None:
    if rig is not None:
        rig(number)
    _Served(config, number, pipe).run()
