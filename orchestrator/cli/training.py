"""Runs `freshet train` and `freshet follow`: progress for people, a report and a summary at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console

from orchestrator.analysis.summary import summarize
from orchestrator.cli.beside import beside
from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.text.progress import open_progress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.client.following import JobResult, attached
from orchestrator.client.running import detach, run
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import fold
from orchestrator.report.page import write_report
from orchestrator.spec.job_spec import load
from planner.wording import counted
from workers.protocol.errors import JobError
from workers.protocol.reports import SampleReport


def train_command(
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    profile: Path | None,
    replay: Path | None,
    summary: Path | None,
    dashboard: bool = False,
) -> int:
    """Run the job and return the exit code.

    Args:
        dashboard: serve its page meanwhile.

    Raises:
        JobError: something that the user can fix.
    """
    started_s = psutil.Process().create_time()
    spec = load(path, overrides)
    if summary is not None and not summary.resolve().parent.is_dir():
        raise JobError(f"--summary {summary}: there is no folder {summary.resolve().parent}")
    console = Console()
    with (
        open_progress(console, spec.job.name, spec.job.steps) as progress,
        beside(dashboard, progress.note) as serve,
    ):
        show = TrainingLines(progress)

        def observe(record: events.Record) -> None:
            show(record)
            serve(record)

        done = run(spec, resume=resume, profile=profile, replay=replay, observe=observe, say=progress.note)
    if summary is not None:
        numbers = summarize(done.events_path, started_s=started_s)
        try:
            summary.write_text(numbers.to_json() + "\n")
        except OSError as error:
            raise JobError(f"trained, but cannot write --summary {summary}: {error.strerror}") from error
    return _conclude(console, done, _write_report(done))


def detach_command(
    path: Path, overrides: Sequence[str], *, resume: bool, profile: Path | None, replay: Path | None
) -> int:
    """Submit the job, leave it, and return the exit code.

    Raises:
        JobError: something that the user can fix.
        KeyboardInterrupt: a signal came before the job was running.
    """
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    job = detach(load(path, overrides), resume=resume, say=say, profile=profile, replay=replay)
    if job.end is None:
        say(
            f"{job.name} trains in {job.folder}: freshet follow {job.name} shows it, freshet cancel {job.name} ends it"
        )
    return DONE


def follow_command(job: str, address: str) -> int:
    """Follow a running job to its end and return the exit code.

    Raises:
        JobError: there is no such job, or it ended for a reason that the user can fix.
        KeyboardInterrupt: a signal came; the job goes on.
    """
    console = Console()
    with attached(job, address) as following:
        spec = following.spec
        hosts = [
            record.event.host for record in following.past if isinstance(record.event, events.RankStarted)
        ]
        with open_progress(console, job, spec.job.steps) as progress:
            progress.expect_freezing(spec.freeze.model_dump(mode="json"))
            progress.note(f"following {job} in {spec.job.folder}; Ctrl-C ends that, and not the job")
            done = following.run(TrainingLines(progress, hosts), progress.note)
    return _conclude(console, done, _write_report(done))


def _write_report(done: JobResult) -> str:
    """Write `report.html`. Return its path, or why it was not written."""
    try:
        report = write_report(done.events_path, folder=done.spec.job.folder)
        JobFolder(done.spec.job.folder).publish(report)
    except OSError as error:
        return f"not written: {error.strerror or error}"
    return str(report)


def _conclude(console: Console, done: JobResult, report: str) -> int:
    def post(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    records = list(read_log(done.events_path))
    samples = [record.event for record in records if isinstance(record.event, SampleReport)]
    if isinstance(done.end, events.Failed):
        failures = [record.event for record in records if isinstance(record.event, events.RankFailed)]
        details = next((failure.details for failure in reversed(failures) if failure.details), "")
        if details:
            post(details)
        post(f"FAILED: {done.end.reason}")
    elif done.end.stopped and done.end.step == 0:
        post("stopped before the first step")
    elif done.end.stopped:
        post(f"stopped at step {done.end.step} of {fold(records).last_step}; go on with --resume")
    else:
        if samples:
            post(f"sample: {_printable(samples[-1].prompt + samples[-1].text)}")
        why = f", {done.end.why}" if done.end.why else ""
        post(f"done: {counted(done.end.step, 'step')}{why}")
    post(f"report: {report}")
    if isinstance(done.end, events.Failed):
        code = INTERRUPTED if done.interrupted else FAILED
    else:
        code = INTERRUPTED if done.interrupted and done.end.stopped else DONE
    if done.headless:
        # Without its head, Ray may crash an interpreter that ends in order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _printable(text: str) -> str:
    """`text` without terminal control characters: an untrained model writes any byte."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
