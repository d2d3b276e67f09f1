"""Runs the jobs of a sweep, one after the other or some side by side, each as a `freshet train` of its own.

A job that is done is not run again, and one that was begun goes on from its newest checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.client.interrupts import Interrupts
from orchestrator.events.segments import replace_file
from orchestrator.spec.job_spec import Spec, load
from orchestrator.sweep.grid import Cell
from orchestrator.sweep.outcomes import SweptJob, csv_text, outcome_of
from orchestrator.sweep.page import page_of
from planner.wording import counted
from workers.protocol.errors import JobError

CSV_NAME, PAGE_NAME = "sweep.csv", "sweep.html"
NOT_RUN = "not run: the sweep was interrupted"
_SUMMARY, _ASKED, _OUTPUT = "summary.json", "asked.json", "output.txt"


@dataclass(kw_only=True)
class Sweep:
    """One sweep.

    Args:
        path: the spec's file.
        overrides: of the spec, for all jobs.
        folder: the jobs' folders, CSV and page lie there.
        say: takes what happens, in words.
    """

    path: Path
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    folder: Path
    say: Callable[[str], None]
    interrupted: bool = field(default=False, init=False)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)
    _change: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, spec: Spec, *, beside: int) -> list[SweptJob]:
        """Run every job that is not done, and write CSV and page.

        Args:
            spec: as it is without the grid.
            beside: jobs that run at a time.

        Raises:
            JobError: the folder holds jobs of another sweep, or cannot be written to.
        """
        for cell in self.cells:
            self._check(cell)
        with Interrupts(self._stop) as interrupts, ThreadPoolExecutor(beside) as pool:
            interrupts.hold()
            outcomes = list(pool.map(self._outcome, self.cells))
        self._write(spec, outcomes)
        return outcomes

    def _check(self, cell: Cell) -> None:
        """Note what the job of `cell` is asked.

        Raises:
            JobError: its folder holds a job that was asked something else.
        """
        folder = self.folder / cell.name
        asked = {"spec": self.path.read_text(encoding="utf-8"), "set": [*self.overrides, *cell.overrides]}
        note = folder / _ASKED
        try:
            if note.exists() and json.loads(note.read_text(encoding="utf-8")) != asked:
                raise JobError(
                    f"{folder} holds a job of a sweep with another spec or other settings: give a new folder with --out"
                )
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(asked), encoding="utf-8")
        except OSError as error:
            raise JobError(f"cannot write to {folder}: {error.strerror or error}") from error

    def _outcome(self, cell: Cell) -> SweptJob:
        folder = self.folder / cell.name
        summary = folder / _SUMMARY
        if not summary.exists() and (error := self._train(cell, folder)):
            self.say(f"{cell.name}: {error}")
            return SweptJob(cell=cell, error=error)
        method = load(self.path, [*self.overrides, *cell.overrides]).freeze.method
        outcome = outcome_of(cell, json.loads(summary.read_text(encoding="utf-8")), method)
        loss = outcome.numbers.get("loss")
        self.say(f"{cell.name}: done" + ("" if loss is None else f", validation loss {loss:.4f}"))
        return outcome

    def _train(self, cell: Cell, folder: Path) -> str:
        """Train the job of `cell`; why it is not done, empty if it is."""
        job, partial = folder / "job", folder / f"{_SUMMARY}.partial"
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{self.folder.name}-{cell.name}").strip("-")
        own = (f"job.output={json.dumps(str(job))}", f"job.name={json.dumps(name)}")
        words = [*self.overrides, *cell.overrides, *own]
        command = [sys.executable, "-m", "orchestrator", "train", str(self.path), "--summary", str(partial)]
        command += [part for word in words for part in ("--set", word)]
        if any((job / "checkpoints").glob("step-*")):
            command.append("--resume")
        elif job.exists():
            shutil.rmtree(job)  # begun, with nothing to go on from
        with (folder / _OUTPUT).open("ab") as output:
            # A session of its own: a signal reaches it once, through this process.
            with self._change:
                if self.interrupted:
                    return NOT_RUN
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
                self._running.add(process)
            code = process.wait()
            with self._change:
                self._running.discard(process)
        if code == 0 and partial.exists():
            partial.rename(folder / _SUMMARY)
            return ""
        if self.interrupted:
            return "stopped, with a checkpoint: the same command goes on"
        return _last_line(folder / _OUTPUT) or f"ended with exit status {code}"

    def _stop(self) -> None:
        """Stop the jobs that run, and begin no other one."""
        with self._change:  # only the jobs' threads hold it, and briefly
            self.interrupted = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)

    def _write(self, spec: Spec, outcomes: Sequence[SweptJob]) -> None:
        replace_file(self.folder / CSV_NAME, csv_text(outcomes).encode())
        about = (
            f"{counted(len(outcomes), 'job')} of {self.path.name}; each figure is a mean over seeds, with the least and"
            " the greatest where they differ."
        )
        page = page_of(f"Sweep of {spec.job.name}", about, outcomes)
        replace_file(self.folder / PAGE_NAME, page.encode())


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("freshet: ") if lines else ""
