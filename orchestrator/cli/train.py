"""`freshet train` and `freshet follow`: progress for people, a report and a summary at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Console

from orchestrator.analysis.summary import summarize
from orchestrator.cli.main import DONE, FAILED, INTERRUPTED
from orchestrator.cli.progress import BarProgress, LineProgress, open_progress
from orchestrator.client.following import Run, attached
from orchestrator.client.submit import run
from orchestrator.events import types as events
from orchestrator.events.folder import JobFolder
from orchestrator.events.wording import injected_text, noticed_text
from orchestrator.quantities import counted, seconds
from orchestrator.report.page import write_report
from orchestrator.spec.job_spec import load
from workers.protocol import JobError


def train_command(
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    profile: Path | None,
    replay: Path | None,
    summary: Path | None,
) -> int:
    """Run the job; returns the exit code.

    Raises:
        JobError: something that the user can mend.
    """
    started_s = psutil.Process().create_time()
    spec = load(path, overrides)
    if summary is not None and not summary.resolve().parent.is_dir():
        raise JobError(f"--summary {summary}: there is no folder {summary.resolve().parent}")
    console = Console()
    with open_progress(console, spec.job.name, spec.job.steps) as progress:
        done = run(
            spec,
            resume=resume,
            profile=profile,
            replay=replay,
            observe=observer(progress),
            say=progress.note,
        )
    if summary is not None:
        numbers = summarize(done.events_path, started_s=started_s)
        try:
            summary.write_text(numbers.to_json() + "\n")
        except OSError as error:
            raise JobError(f"trained, but cannot write --summary {summary}: {error.strerror}") from error
    return _conclude(console, done, _write_report(done))


def follow_command(job: str, address: str) -> int:
    """Follow a running job to its end; returns the exit code.

    Raises:
        JobError: there is no such job, or something that the user can mend has ended it.
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
            done = following.run(observer(progress, hosts), progress.note)
    return _conclude(console, done, _write_report(done))


def observer(
    progress: BarProgress | LineProgress, hosts: Sequence[str] = ()
) -> Callable[[events.Record], None]:
    """Shows reports as progress and the rest in words.

    Args:
        hosts: of the ranks that there are already.
    """
    known = [*hosts]

    def observe(record: events.Record) -> None:
        match record.event:
            case (
                events.StepReport()
                | events.ValidationReport()
                | events.CheckpointReport()
                | events.TimelineReport()
                | events.SampleReport()
                | events.FreezeReport()
            ):
                progress.show(record.event)
            case events.Submitted(spec=spec):
                progress.expect_freezing(spec.get("freeze", {}))
            case events.Issued(plan=plan):
                counts = [stop - first for first, stop in plan.layers]
                progress.note(
                    f"plan: {plan.schedule}, layers per stage {counts}, {counted(plan.world_size, 'rank')}"
                )
            case events.RankStarted(host=host):
                known.append(host)
            case events.Formed(start=None, step=int(step)) if step:
                return  # what the ranks hold; that they train again is told by `Regrouped`
            case events.Formed(generation=generation, start=start):
                where = f"{counted(len(generation.members), 'rank')} on {counted(len(set(known)), 'host')}"
                begin = f"resuming from {start.path}" if start is not None else "from initial weights"
                progress.note(f"training: {where}, {begin}")
            case events.Skipped(damage=damage):
                progress.note(
                    f"checkpoint {damage.path} is damaged and skipped: {damage.file} {damage.problem}",
                    warning=True,
                )
            case events.FreezeSolved() as solved:
                progress.note(
                    f"freezing: {seconds(solved.unfrozen_s)} of computation per step are to become"
                    f" {seconds(solved.solved_s)} ({seconds(solved.all_frozen_s)} if all were frozen)"
                    + (", by the profile's times" if solved.measured_unfrozen_s is None else "")
                )
            case events.FreezeStarted(plan=plan):
                progress.note(f"freezing: its ratios take effect with step {plan.start}")
            case events.Noticed() as notice:
                progress.note(noticed_text(notice), warning=True)
            case events.Warned(text=text):
                progress.note(text, warning=True)
            case events.FaultReport() as inject:
                progress.note(injected_text(inject), warning=True)
            case events.WarningReport(rank=rank, text=text):
                progress.note(f"rank {rank}: {text}", warning=True)
            case events.Regrouped() as regrouped:
                parts = (regrouped.detect_s, regrouped.settle_s, regrouped.plan_s, regrouped.move_s)
                took = seconds(sum(parts) + regrouped.resume_s)
                progress.note(
                    f"training goes on after step {regrouped.step}, {took} later: {regrouped.reason}"
                )
            case events.Migrated() as moved:
                layers = ", ".join(map(str, moved.layers))
                progress.note(
                    f"layers {layers} have moved ({moved.mode}): {seconds(moved.seconds)} and"
                    f" {counted(moved.steps, 'step')} on the way, {seconds(moved.stall_s)} of standing still"
                )
            case events.Paused(reason=reason):
                progress.note(f"waiting for capacity: {reason}", warning=True)
            case events.RankFailed(rank=rank, error=error):
                progress.note(f"rank {rank}: {error}", warning=True)
            case _:
                return

    return observe


def _write_report(done: Run) -> str:
    """Write `report.html`; returns where it is, or why it is not."""
    try:
        report = write_report(done.events_path)
        JobFolder(done.spec.job.folder).publish(report)
    except OSError as error:
        return f"not written: {error.strerror or error}"
    return str(report)


def _conclude(console: Console, done: Run, report: str) -> int:
    def post(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    records = list(events.read(done.events_path))
    samples = [record.event for record in records if isinstance(record.event, events.SampleReport)]
    if isinstance(done.end, events.Failed):
        failures = [record.event for record in records if isinstance(record.event, events.RankFailed)]
        details = next((failure.details for failure in reversed(failures) if failure.details), "")
        if details:
            post(details)
        post(f"FAILED: {done.end.reason}")
    elif done.end.stopped and done.end.step == 0:
        post("stopped before the first step")
    elif done.end.stopped:
        post(f"stopped at step {done.end.step} of {done.spec.job.steps}; go on with --resume")
    else:
        if samples:
            post(f"sample: {_printable(samples[-1].prompt + samples[-1].text)}")
        post(f"done: {done.end.step} steps")
    post(f"report: {report}")
    if isinstance(done.end, events.Failed):
        return INTERRUPTED if done.interrupted else FAILED
    return INTERRUPTED if done.interrupted and done.end.stopped else DONE


def _printable(text: str) -> str:
    """`text` without what a terminal would obey: a young model writes any byte."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
