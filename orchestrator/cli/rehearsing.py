"""Runs `freshet rehearse`: makes a trace and a job from its options, and shows the numbers or writes JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.text.progress import open_progress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.events import types as events
from orchestrator.history.folder import MARKER, JobFolder
from orchestrator.rehearsal.rehearsal import Performance, Rehearsal, nodes_wanted, ranks_of, rehearse
from orchestrator.rehearsal.synthetic_trace import MINUTE_MS, Preemption, synthetic
from orchestrator.rehearsal.traces import NodeTrace, keep, parse, to_csv, window
from orchestrator.report.page import write_report
from orchestrator.report.rehearsal_text import lines
from orchestrator.spec.job_spec import Spec, load
from planner.wording import counted
from workers.protocol.errors import JobError

SYNTHETIC_MIN = 60.0
"""Length of a synthetic trace without a window."""


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """The options of the command line."""

    spec: Path
    trace: Path | None = None
    synthetic: str | None = None
    nodes: int | None = None
    ranks: int | None = None
    speedup: float | None = None
    window: str | None = None
    grace: str = "none"
    seed: int = 0
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    finish: bool = False
    write_trace: Path | None = None
    as_json: bool = False


def rehearse_command(options: RehearsalOptions) -> int:
    """Rehearse and return the exit code.

    Raises:
        JobError: something that the user can fix.
        KeyboardInterrupt: a signal came before the job was running.
    """
    spec = load(options.spec, options.overrides)
    performance = performance_of(options, spec)
    write_trace(options, performance.trace)
    # Standard output is for JSON alone; progress goes to standard error.
    console = Console(file=sys.stderr if options.as_json else sys.stdout)
    folder = performance.spec.job.folder
    with (
        nothing_left_unless_begun(Path(folder)),
        open_progress(console, spec.job.name, spec.job.steps) as progress,
        without_ray(),
    ):
        if options.out is not None:
            check_out(folder, spec.job.name)
        done = rehearse(performance, observe=TrainingLines(progress), say=progress.note)
    _conclude(console, done, options.as_json)
    if isinstance(done.run.end, events.Failed) or done.cut_short is not None:
        return INTERRUPTED if done.run.interrupted else FAILED
    return INTERRUPTED if done.run.interrupted else DONE


@contextmanager
def without_ray() -> Iterator[None]:
    """Discard Ray's messages about vanishing nodes: a rehearsal kills them on purpose."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def nothing_left_unless_begun(folder: Path) -> Iterator[None]:
    """On an error or a signal, remove `folder` if it was made meanwhile and no job has begun in it: the next rehearsal
    would take another one."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there and not any(folder.rglob(MARKER)):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_out(folder: str, job: str) -> None:
    """Raises:
    JobError: `folder`, which --out names, cannot be written or holds something else than what a new job leaves there.
    """
    out = JobFolder(folder, option="--out")
    out.admit(job, resume=False)
    if (lock := out.lock()) is not None:
        lock.close()


def performance_of(options: RehearsalOptions, spec: Spec) -> Performance:
    """The rehearsal that `options` describe.

    Raises:
        JobError: an option makes no sense, a file is no trace, or the spec does not fit the trace.
    """
    if options.speedup is not None and not (math.isfinite(options.speedup) and options.speedup > 0):
        raise JobError(f"--speedup {options.speedup:g}: it must be above 0")
    grace_s = _grace(options.grace)
    trace, source = _trace(options, spec)
    ranks = ranks_of(spec, options.ranks, trace.most)
    folder = str(options.out) if options.out is not None else _folder(spec, options.overrides)
    return Performance(
        spec=spec.model_copy(update={"job": spec.job.model_copy(update={"output": folder})}),
        trace=trace,
        source=source,
        ranks=ranks,
        speedup=options.speedup,
        grace_s=grace_s,
        finish=options.finish,
    )


def _trace(options: RehearsalOptions, spec: Spec) -> tuple[NodeTrace, str]:
    """The trace to replay and its source."""
    if (options.trace is None) == (options.synthetic is None):
        raise JobError("name a trace: either --trace FILE or --synthetic P:D")
    span = _window(options.window) if options.window is not None else None
    if options.trace is not None:
        trace = _read(options.trace)
        trace, source = keep(trace, nodes_wanted(spec, options.nodes, trace)), options.trace.name
    else:
        assert options.synthetic is not None
        preemption = Preemption.parse(options.synthetic)
        nodes = options.nodes
        if nodes is None:
            if isinstance(spec.pipeline.ranks, str):
                raise JobError("--synthetic with pipeline.ranks = 'auto': say how many with --nodes")
            nodes = spec.pipeline.ranks
        length_min = span[1] / MINUTE_MS if span is not None else SYNTHETIC_MIN
        trace = synthetic(nodes, preemption, length_min, options.seed)
        source = f"synthetic {options.synthetic}, seed {options.seed}"
    if span is not None:
        trace = window(trace, *span)
        source += f", minutes {options.window}"
    return trace, f"{source}, {counted(trace.most, 'node')}"


def _read(path: Path) -> NodeTrace:
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise JobError(f"cannot read --trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"trace {path} is not CSV: it is no UTF-8 text") from error


def _window(text: str) -> tuple[int, int]:
    """First and last millisecond of `A-B` in minutes."""
    first, dash, last = text.partition("-")
    try:
        if not dash:
            raise ValueError
        return round(float(first) * MINUTE_MS), round(float(last) * MINUTE_MS)
    except (ValueError, OverflowError):
        raise JobError(f"--window {text}: expected A-B in minutes of the trace, such as 30-90") from None


def _grace(text: str) -> float | None:
    if text == "none":
        return None
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = math.nan
    if not (math.isfinite(grace_s) and grace_s > 0):
        raise JobError(f"--grace {text}: expected seconds above 0, or none")
    return grace_s


def _folder(spec: Spec, overrides: Sequence[str]) -> str:
    """The folder that `--set` names, otherwise one for the rehearsal that has no run yet.

    `job.output` of the file is the job's own: a rehearsal does not write there.
    """
    if spec.job.output is not None and any(
        override.partition("=")[0].strip() == "job.output" for override in overrides
    ):
        return spec.job.output
    for number in count(1):
        folder = f"runs/{spec.job.name}-rehearsal" + (f"-{number}" if number > 1 else "")
        if JobFolder(folder).marker() is None:
            return folder
    raise AssertionError("numbers do not end")


def write_trace(options: RehearsalOptions, trace: NodeTrace) -> None:
    """Write `trace` to the file that `options` name, if they name one.

    Raises:
        JobError: it cannot be written.
    """
    path = options.write_trace
    if path is None:
        return
    try:
        path.write_text(to_csv(trace), encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot write --write-trace {path}: {error.strerror or error}") from error


def _conclude(console: Console, done: Rehearsal, as_json: bool) -> None:
    def post(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    run = done.run
    try:
        report = str(write_report(run.events_path))
        JobFolder(run.spec.job.folder).publish(Path(report))
    except OSError as error:
        report = f"not written: {error.strerror or error}"
    if isinstance(run.end, events.Failed):
        post(f"FAILED: {run.end.reason}")
    if done.cut_short is not None:
        post(f"FAILED: the trace ended early, and the job was stopped: {done.cut_short}")
    if as_json:
        numbers = {
            "rehearsal": done.found.to_dict() if done.found is not None else None,
            "steps": run.end.step if isinstance(run.end, events.Finished) else None,
            "state_sha256": run.end.state_sha256 if isinstance(run.end, events.Finished) else None,
            "failed": run.end.reason if isinstance(run.end, events.Failed) else done.cut_short,
            "events": str(run.events_path),
            "report": report,
        }
        print(json.dumps(numbers, indent=1))
        return
    if done.found is None:
        post("the job ended before the trace began")
    else:
        for line in lines(done.found):
            post(line)
    if isinstance(run.end, events.Finished) and run.end.state_sha256 is not None:
        post(f"step {run.end.step}, state_sha256 {run.end.state_sha256}")
    post(f"computed from: {run.events_path}")
    post(f"report: {report}")
