"""Ranks started as processes report to their parent process and follow the freeze plan that it returns."""

import gc
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from jobs import job, small_config

from planner.freezing import FreezePlan
from workers.config import EmulatedConfig, FreezeConfig
from workers.launch.processes import AT_FIRST_USE, LaunchedProcesses
from workers.launch.ranks import run_processes
from workers.protocol.reports import FreezeReport, FreezeStarted, Report, TimelineReport


def test_all_ranks_take_up_the_plan_that_an_observer_returns(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        steps=15,
        device="emulated",
        emulated=EmulatedConfig(forward_s=0.005, input_grad_s=0.005, weight_grad_s=0.005),
        freeze=FreezeConfig(method="timelyfreeze", r_max=0.8, warm_up=0, monitoring=2, ramp=2),
    )
    plan = FreezePlan(epoch=1, version=1, ratios=((1.0,) * 4,) * 8)
    seen: list[Report] = []

    def observe(report: Report) -> FreezePlan | None:
        seen.append(report)
        last = isinstance(report, TimelineReport) and (report.step, report.rank) == (2, 1)
        return plan if last else None

    run = run_processes(job(config, ranks=2, schedule="1f1b"), observe)
    assert seen == run.reports
    (started,) = [report.plan for report in run.reports if isinstance(report, FreezeStarted)]
    assert started.digest == plan.digest
    assert started.start is not None
    assert started.start > 2
    frozen = {
        (report.step, report.rank): [action.actual for action in report.actions]
        for report in run.reports
        if isinstance(report, FreezeReport) and report.step > 2
    }
    expected = {step: 1.0 if step >= started.start else 0.0 for step in range(3, config.job.steps + 1)}
    assert frozen == {(step, rank): [share] * 4 for step, share in expected.items() for rank in range(2)}


def _tell_kept_objects(_: None, rank: int, pipe: Connection) -> None:
    pipe.send((gc.get_freeze_count(), gc.isenabled()))
    pipe.recv()


def test_ranks_collect_none_of_what_they_inherit() -> None:
    with LaunchedProcesses(1, _tell_kept_objects, None) as ranks:
        ((_, (kept, enabled)),) = [next(ranks.receive())]
        ranks.done(0)
    assert kept > 100_000, "torch alone makes more"
    assert enabled


def _tell_what_is_lacking(more: str | None, rank: int, pipe: Connection) -> None:
    named = {more} if more else set()
    pipe.send(sorted({*named, *AT_FIRST_USE, "numpy.random", "workers.launch.ranks"} - sys.modules.keys()))
    pipe.recv()


def test_ranks_inherit_what_they_would_import_at_first_use() -> None:
    """The fork server says nothing of a module that it cannot import."""
    with LaunchedProcesses(1, _tell_what_is_lacking, None) as ranks:
        ((_, lacking),) = [next(ranks.receive())]
        ranks.done(0)
    assert lacking == []


def test_ranks_inherit_what_their_models_import() -> None:
    """In a process of its own: what a fork server imports is fixed once it has forked."""
    program = (
        "from test_launch import _tell_what_is_lacking\n"
        "from workers.launch.processes import LaunchedProcesses\n"
        "if __name__ == '__main__':\n"
        "    with LaunchedProcesses(1, _tell_what_is_lacking, 'wave', ('wave',)) as ranks:\n"
        "        print(next(ranks.receive()))\n"
        "        ranks.done(0)\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "(0, [])\n"
