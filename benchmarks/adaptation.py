"""Slow ranks: how soon the load has moved, and how near the step then comes to the best cut there is.

    python -m benchmarks.adaptation [--factor F ...] [--slow K ...] [--pass-ms M] [--layers N] [--ranks N]
        [--microbatches N] [--counted N] [--schedule NAME]

Each case is a job of emulated ranks of which some become slow for good. It runs with `[adapt] policy = "measured"` and
"off", and with the best cut from the beginning. That one has the least simulated step of all cuts that give the slow
ranks some number of layers each and spread the rest as evenly as they go. The limit of perfect balance is the work over
the sum of the speeds.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch

from benchmarks.parts.process_jobs import AdaptingJob, ElasticJob, Ran
from benchmarks.parts.slow_rank_job import best_cut, job, profile_of
from benchmarks.parts.targets import at_most
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.reports import FaultReport, StepReport

MICROBATCHES = 8
WARM_UP = 6
"""Steps before ranks become slow: their first speeds are known by then."""
SETTLED = 8
"""Steps after that which are not counted."""
COUNTED = 6
"""The last steps, of which the median is taken."""


def run(
    folder: Path,
    policy: str,
    slow: Sequence[int],
    factor: float,
    given: argparse.Namespace,
    counts: tuple[int, ...] | None = None,
) -> Ran:
    """A job whose ranks `slow` become slow: after the warm-up where it adapts, else after the first step."""
    warm_up, settled = (WARM_UP, SETTLED) if policy != "off" else (1, 2)
    made = job(folder, policy, warm_up + settled + given.counted, given, counts)

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == warm_up:
            for rank in slow:
                running.call(rank, "arm", Fault(kind=FaultKind.SLOW, factor=factor))

    ran = AdaptingJob(made, act, profile_of(made, given)).run(limit_s=900.0)
    assert isinstance(ran.state, JobFinished), ran.state
    return ran


def settled_s(ran: Ran, counted: int) -> float:
    """The median of the last steps."""
    return median(report.step_s for report in ran.of(StepReport)[-counted:])


def measured(slow: Sequence[int], factor: float, given: argparse.Namespace) -> str:
    """The row of one case."""
    with tempfile.TemporaryDirectory() as folder:
        made = job(Path(folder), "off", 1, given)
        best, counts = best_cut(made, profile_of(made, given), slow, factor)
        adapted = run(Path(folder), "measured", slow, factor, given)
        idle = run(Path(folder), "off", slow, factor, given)
        knows = settled_s(run(Path(folder), "off", slow, factor, given, counts), given.counted)
    began = min(fault.step for fault in adapted.of(FaultReport))
    moved = [event for event in adapted.of(events.Migrated) if event.step >= began]
    after, off = settled_s(adapted, given.counted), settled_s(idle, given.counted)
    limit = 1 - (given.ranks / (given.ranks - len(slow) + len(slow) / factor)) / factor
    in_force = f"in force after {moved[0].step - began + 1} steps" if moved else "no move"
    took = {report.step: report.step_s for report in adapted.of(StepReport)}
    last = moved[0].step if moved else began
    lost = sum(max(0.0, took[step] - after) for step in range(began, last + 1)) / after
    return (
        f"{len(slow)} slow, factor {factor:g}: {after * 1e3:6.0f} ms, off {off * 1e3:6.0f} ms:"
        f" {1 - after / off:.1%} below (limit {limit:.1%}); "
        + at_most(f"over the best cut {after / knows:.3f}", after / knows, 1.05)
        + f" ({after / best:.3f} as simulated, whose own {1 - best / off:.1%} below); {in_force},"
        f" {lost:.1f} steps lost against an oracle;"
        f" layers {list(adapted.of(events.Issued)[-1].plan.layers_per_stage)}, best {list(counts)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, action="append")
    parser.add_argument("--slow", type=int, action="append", help="how many ranks become slow")
    parser.add_argument("--pass-ms", type=float, default=4.0, help="of a layer and microbatch")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--counted", type=int, default=COUNTED, help="last steps of each job")
    parser.add_argument(
        "--schedule", default="1f1b", choices=("gpipe", "1f1b", "zb-h1"), help="one stage per rank"
    )
    given = parser.parse_args(arguments)
    print(
        f"{given.ranks} emulated ranks, {given.layers} equal layers, {given.microbatches} microbatches, passes of"
        f" {given.pass_ms:g} ms, {given.schedule}; {platform.machine()}, {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}"
    )
    for count in given.slow or (1, 2):
        slow = [2, 5][:count]
        for factor in given.factor or (1.1, 1.8, 3.2):
            print(measured(slow, factor, given), flush=True)


if __name__ == "__main__":
    main()
