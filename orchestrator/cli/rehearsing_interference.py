"""Runs `freshet rehearse --interference`: the same job beside the same neighbour, without and with adaptation."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rich.console import Console

from orchestrator.analysis.interference_time import interference_time
from orchestrator.cli.beside import beside
from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.rehearsing import (
    RehearsalOptions,
    nothing_left_unless_begun,
    performance_of,
    without_ray,
    write_trace,
)
from orchestrator.cli.text.progress import open_progress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.following import JobResult, Observer
from orchestrator.client.running import run
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.folder import PROFILE, JobFolder
from orchestrator.history.job_view import fold
from orchestrator.prepare.model_outline import absolute
from orchestrator.prepare.profiling import profile_of, write
from orchestrator.prepare.settling import opened
from orchestrator.rehearsal.disturbing import Interference
from orchestrator.rehearsal.interference import Say, disturbable, drill_of, interference, train_disturbed
from orchestrator.rehearsal.rehearsal import Performance, rehearse
from orchestrator.report.interference.interference_page import PAGE_NAME, write_interference_page
from orchestrator.report.interference.interference_text import lines
from orchestrator.report.page import write_report
from orchestrator.spec.job_spec import Spec, load
from orchestrator.spec.rules import check
from workers.fault_injection.fault import Fault
from workers.protocol.errors import JobError

OFF = "off"
MINUTES = 10.0
NAME_LENGTH = 50
"""Most characters of a job's name, before the policy is added to it."""


@dataclass(frozen=True, kw_only=True)
class InterferenceOptions:
    """The options of the command line that describe the neighbour."""

    level: str
    kind: str | None = None
    rank: int | None = None
    every: int | None = None
    policies: tuple[str, ...] = ()
    """Empty: the job's own, or `measured` if that is off."""
    beside_off: bool = True
    dashboard: bool = False
    minutes: float = MINUTES
    """Limit for the steps of all jobs together."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The jobs to train, one after the other."""

    name: str
    """Name of the job in the file."""
    folder: Path
    specs: tuple[Spec, ...]
    """One per policy."""
    interference: Interference
    trace: Performance | None
    """The trace that is replayed meanwhile, if any."""


def interference_command(options: RehearsalOptions, given: InterferenceOptions) -> int:
    """Rehearse and return the exit code.

    Raises:
        JobError: something that the user can fix.
        KeyboardInterrupt: a signal came before a job was running.
    """
    # Standard output is for JSON alone; progress goes to standard error.
    console = Console(file=sys.stderr if options.as_json else sys.stdout)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    trials = trials_of(options, given, len(os.sched_getaffinity(0)), say)
    if trials.trace is not None:
        write_trace(options, trials.trace.trace)
    done: list[JobResult] = []
    trace = trials.trace
    with nothing_left_unless_begun(trials.folder):
        say("measuring the job before any neighbour comes")
        profile = _measured(trials, say)
        left_s = given.minutes * 60
        for number, spec in enumerate(trials.specs):
            say(f"training with adapt.policy = {spec.adapt.policy!r}")
            limit_s, begun_s = left_s / (len(trials.specs) - number), time.monotonic()
            trained, trace = _train(
                spec, trials.interference, profile, trace, console, given.dashboard, limit_s
            )
            left_s = max(0.0, left_s - (time.monotonic() - begun_s))
            done.append(trained)
            if trained.interrupted or isinstance(trained.end, events.Failed):
                break
    _conclude(done, trials, options.as_json, say)
    if done[-1].interrupted:
        return INTERRUPTED
    return FAILED if isinstance(done[-1].end, events.Failed) else DONE


def trials_of(options: RehearsalOptions, given: InterferenceOptions, cores: int, say: Say) -> Trials:
    """The jobs that the options describe, on a machine with so many cores.

    Raises:
        JobError: an option makes no sense, or the spec cannot be disturbed or adapt.
    """
    if not 0 < given.minutes < math.inf:
        raise JobError(f"--minutes {given.minutes:g}: give the jobs more than no time")
    if OFF in given.policies:
        raise JobError("--policy off adapts nothing: it is the job that the other one is compared with")
    if len({*given.policies}) < len(given.policies):
        raise JobError(f"--policy {', '.join(given.policies)}: one of them is named twice")
    own = load(options.spec, options.overrides).adapt.policy
    policies = given.policies or (own if own != OFF else "measured",)
    policies = (OFF, *policies) if given.beside_off else policies
    loaded = [load(options.spec, (*options.overrides, f"adapt.policy={policy}")) for policy in policies]
    first, trace = loaded[0], None
    ranks = options.ranks
    if options.trace is not None or options.synthetic is not None:
        trace = performance_of(options, first)
        ranks = trace.ranks
    else:
        _refuse_trace_options(options)
        if ranks is None and any(
            each.partition("=")[0].strip() == "pipeline.ranks" for each in options.overrides
        ):
            ranks = first.pipeline.ranks if isinstance(first.pipeline.ranks, int) else None
    folder = _folder(options, first)
    notes: list[str] = []
    apt = disturbable(first, ranks, cores, notes.append)
    plan = interference(apt, given.level, given.kind, given.rank, given.every)
    specs = []
    for policy, spec in zip(policies, loaded, strict=True):
        name = f"{first.job.name[:NAME_LENGTH]}-{policy}"
        job = apt.job.model_copy(update={"name": name, "output": str(folder / policy)})
        specs.append(apt.model_copy(update={"job": job, "adapt": spec.adapt}))
        option = "--out" if options.out is not None else None
        JobFolder(str(folder / policy), option).admit(name, resume=False)
    for note in notes:
        say(note)
    return Trials(name=first.job.name, folder=folder, specs=tuple(specs), interference=plan, trace=trace)


def _refuse_trace_options(options: RehearsalOptions) -> None:
    given = {
        "--nodes": options.nodes,
        "--speedup": options.speedup,
        "--window": options.window,
        "--grace": None if options.grace == "none" else options.grace,
        "--finish": options.finish or None,
        "--write-trace": options.write_trace,
    }
    for name, value in given.items():
        if value is not None:
            raise JobError(f"{name} goes with a trace: name one with --trace FILE or --synthetic P:D")


def _folder(options: RehearsalOptions, spec: Spec) -> Path:
    """The folder of the jobs' folders: as asked, or the first of its name that is not there yet."""
    if options.out is not None:
        return options.out
    for number in count(1):
        folder = Path(f"runs/{spec.job.name}-interference" + (f"-{number}" if number > 1 else ""))
        if not folder.exists():
            return folder
    raise AssertionError("numbers do not end")


def _measured(trials: Trials, say: Say) -> Path:
    """The file of the profile with which all jobs are planned, measured now.

    Raises:
        JobError: the job cannot be measured, or the folder not be written to.
    """
    spec = check(absolute(trials.specs[-1]))
    path = trials.folder / PROFILE
    try:
        trials.folder.mkdir(parents=True, exist_ok=True)
        _, profile = profile_of(*opened(spec), afresh=True, say=say)
        write(profile, path)
    except OSError as error:
        raise JobError(
            f"cannot write {path}: {error.strerror or error}; --out names another folder"
        ) from error
    return path


def _train(
    spec: Spec,
    plan: Interference,
    profile: Path,
    trace: Performance | None,
    console: Console,
    dashboard: bool,
    limit_s: float,
) -> tuple[JobResult, Performance | None]:
    """Train one of the jobs. Returns also the trace at the speed at which it was replayed."""
    with (
        open_progress(console, spec.job.name, spec.job.steps) as progress,
        beside(dashboard, progress.note, Path(spec.job.folder).parent) as serve,
    ):
        show, replayed = TrainingLines(progress), trace

        def play(spec: Spec, observe: Observer) -> JobResult:
            nonlocal replayed
            if trace is None:
                return run(spec, resume=False, observe=observe, say=progress.note, profile=profile)
            with without_ray():
                done = rehearse(
                    replace(trace, spec=spec), observe=observe, say=progress.note, profile=profile
                )
            if done.cut_short is not None:
                raise JobError(f"the trace ended early, and the job was stopped: {done.cut_short}")
            if trace.speedup is None and done.found is not None:
                # The next job gets it at the same speed, whatever its steps take.
                replayed = replace(trace, speedup=done.found.speedup, finish=True)
            return done.run

        def watch(record: events.Record) -> None:
            show(record)
            serve(record)

        def arm(rank: int, fault: Fault) -> None:
            BlockingJobClient().fault(spec.job.name, drill=drill_of(rank, fault))

        def stop() -> None:
            BlockingJobClient().stop(spec.job.name)

        done = train_disturbed(
            spec, plan, play, arm=arm, observe=watch, say=progress.note, stop=stop, limit_s=limit_s
        )
    return done, replayed


def _conclude(done: Sequence[JobResult], trials: Trials, as_json: bool, say: Callable[[str], None]) -> None:
    logs = [each.events_path for each in done]
    for log in logs:
        _written(lambda log=log: write_report(log))
    page = _written(lambda: write_interference_page(logs, trials.folder / PAGE_NAME, trials.name))
    found = interference_time([fold(read_log(log)) for log in logs])
    if isinstance(done[-1].end, events.Failed):
        say(f"FAILED: {done[-1].end.reason}")
    elif done[-1].interrupted:
        say("interrupted: the numbers are of the steps so far")
    if as_json:
        numbers = {"interference": found.to_dict(), "events": [str(log) for log in logs], "report": page}
        print(json.dumps(numbers, indent=1))
        return
    for line in lines(found):
        say(line)
    say(f"each job's own report: {', '.join(str(log.with_name('report.html')) for log in logs)}")
    say(f"report: {page}")


def _written(make: Callable[[], Path]) -> str:
    """The page's path, or why it was not written."""
    try:
        return str(make())
    except OSError as error:
        return f"not written: {error.strerror or error}"
