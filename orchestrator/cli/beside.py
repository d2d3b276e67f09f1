"""Runs the dashboard beside `freshet train`, in a process of its own that ends with it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.events import types as events
from workers.protocol.reports import StepReport

END_S = 10.0


class Dashboard:
    """The service's process. It starts with the first step: before that it would take processors from the ranks, which
    are starting, and has nothing to show.

    Args:
        say: receives what it prints: its address.
        runs: a folder of runs that it shows too; None: none.
    """

    def __init__(self, say: Callable[[str], None], runs: Path | None = None) -> None:
        self._say = say
        self._runs = runs
        self._process: subprocess.Popen[str] | None = None
        self._tried = False

    def observe(self, record: events.Record) -> None:
        """Start it with the first step, end it with the job."""
        match record.event:
            case StepReport() if self._process is None and not self._tried:
                self._tried = True
                try:
                    self._start()
                except OSError as error:  # the job goes on without it
                    self._say(f"the dashboard could not be started: {error}")
            case events.Finished() | events.Failed() if self._process is not None:
                # Before the cluster ends, of which it takes its leave.
                assert self._process.stdin is not None
                self._process.stdin.close()
            case _:
                pass

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "orchestrator", "dashboard", "--address", address]
        command += [] if self._runs is None else ["--runs", str(self._runs)]
        # In a process group of its own: Ctrl-C is for the job. It ends when its standard input does, that is, with this
        # process, however that ends.
        self._process = subprocess.Popen(
            [*command, "--any-port", "--until-input-ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        threading.Thread(target=self._pass_on, args=(self._process,), daemon=True).start()

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # A service that still starts as the job ends finds no cluster any more.
            if process.stdin is not None and not process.stdin.closed:
                self._say(line.rstrip())


@contextmanager
def beside(
    wanted: bool, say: Callable[[str], None], runs: Path | None = None
) -> Iterator[Callable[[events.Record], None]]:
    """Run the dashboard beside a job, if `wanted`. Yields what must see the job's events.

    Args:
        runs: see `Dashboard`.
    """
    if not wanted:
        yield lambda record: None
        return
    dashboard = Dashboard(say, runs)
    try:
        yield dashboard.observe
    finally:
        dashboard.close()
