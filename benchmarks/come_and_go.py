"""Productive time of a job beside a neighbour that comes and goes.

    python -m benchmarks.come_and_go [--every N ...] [--steps N] [--policy NAME ...] [--factor F]

A job of emulated ranks, one of which is slowed down for `--every` steps and left alone for as many, in turn.
Productive time is what the steps take an oracle, over what they took. The oracle holds the best cut from the first slow
step on and the even one from the first fast step on: its times are the mean steps of two jobs, one with each cut and
nothing to adapt, trained before and once more after the job. What is lost goes to the steps before another cut is in
force, to changes that no move answers, and to the rest: moves, other cuts than the oracle's, and noise of the machine.
Of the rest, the settled steps tell what is no matter of changes: those from the 10th after a change of speed on.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch

from benchmarks.parts.process_jobs import AdaptingJob, ElasticJob, Ran
from benchmarks.parts.slow_rank_job import best_cut, job, profile_of
from benchmarks.parts.targets import at_least
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.reports import StepReport

MICROBATCHES = 4
WARM_UP = 10
"""The first steps do not count."""
ORACLE_STEPS = 200
SETTLED = 10
"""Steps after a change of speed from which on a step counts as settled."""
TARGETS = {100: 0.95, 1000: 0.99}


@dataclass(frozen=True)
class Oracle:
    """Seconds of a step of one who knows, and the layers per rank beside the neighbour."""

    fast_s: float
    slow_s: float
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"an oracle: {self.fast_s * 1e3:.1f} ms alone, {self.slow_s * 1e3:.1f} ms beside the neighbour with"
            f" {list(self.counts)} layers"
        )

    def mean(self, other: Oracle) -> Oracle:
        """Of two repetitions."""
        return Oracle((self.fast_s + other.fast_s) / 2, (self.slow_s + other.slow_s) / 2, self.counts)


def slow_rank(given: argparse.Namespace) -> int:
    """The rank that is slowed down: one in the middle."""
    return given.ranks // 2


def run(
    policy: str,
    steps: int,
    slow: Sequence[tuple[int, int]],
    given: argparse.Namespace,
    counts: tuple[int, ...] | None = None,
) -> Ran:
    """Train `steps` steps; one rank is slow in the given runs of steps, each (first, length)."""
    with tempfile.TemporaryDirectory() as folder:
        made = job(Path(folder), policy, steps, given, counts)

        def act(running: ElasticJob, event: events.Event) -> None:
            if isinstance(event, StepReport) and event.step == 1:
                for first, length in slow:
                    fault = Fault(kind=FaultKind.SLOW, factor=given.factor, step=first, steps=length)
                    running.call(slow_rank(given), "arm", fault)

        ran = AdaptingJob(made, act, profile_of(made, given)).run(limit_s=1800.0)
        assert isinstance(ran.state, JobFinished), ran.state
        return ran


def took(ran: Ran) -> dict[int, float]:
    """Step -> seconds from the commit before to its own, after the warm-up."""
    committed = {report.step: report.committed_s for report in ran.of(StepReport)}
    return {
        after: committed[after] - committed[before]
        for before, after in pairwise(sorted(committed))
        if after > WARM_UP
    }


def mean_s(ran: Ran) -> float:
    return mean(took(ran).values())


def oracle(given: argparse.Namespace) -> Oracle:
    with tempfile.TemporaryDirectory() as folder:
        made = job(Path(folder), "off", 1, given)
    _, counts = best_cut(made, profile_of(made, given), [slow_rank(given)], given.factor)
    return Oracle(
        fast_s=mean_s(run("off", ORACLE_STEPS, (), given)),
        slow_s=mean_s(run("off", ORACLE_STEPS, [(2, ORACLE_STEPS)], given, counts)),
        counts=counts,
    )


def neighbour(every: int, steps: int) -> list[tuple[int, int]]:
    """The runs of slow steps of a job, each (first, length)."""
    return [(first, every) for first in range(every + 1, steps + 1, 2 * every)]


def row(every: int, policy: str, steps: int, ran: Ran, knows: Oracle) -> str:
    """The row of one policy."""
    slow = neighbour(every, steps)
    times = took(ran)
    disturbed = {step for first, length in slow for step in range(first, first + length)}
    ideal = {step: knows.slow_s if step in disturbed else knows.fast_s for step in times}
    whole_s = sum(times.values())
    share = sum(ideal.values()) / whole_s
    moves = sorted(event.step for event in ran.of(events.Migrated))
    switches = [*range(every, steps, every), steps]
    late, wrong, answered, settled = 0.0, 0.0, [], []
    for begin, end in pairwise(switches):
        moved = next((step for step in moves if begin <= step < end), None)
        if moved is not None:
            answered.append(moved - begin)
        settled += range(begin + SETTLED, end + 1)
        lost = {step: times[step] - ideal[step] for step in range(begin + 1, end + 1)}
        late += sum(lost[step] for step in lost if moved is not None and step <= moved)
        wrong += sum(lost.values()) if moved is None else 0.0
    rest = whole_s - sum(ideal.values()) - late - wrong
    text = f"productive time {share:.3f}"
    target = TARGETS.get(every)
    shown = at_least(text, share, target) if target is not None and policy != "off" else text
    steps_late = (
        f"after {sum(answered) / len(answered):.1f} steps (most {max(answered)})" if answered else "never"
    )
    return (
        f"every {every:,} steps, {policy}: {shown}; {steps:,} steps in {whole_s:.0f} s, {len(moves)} moves;"
        f" {len(answered)} of {len(switches) - 1} changes answered, {steps_late}; lost"
        f" {late / whole_s:.1%} before that, {wrong / whole_s:.1%} unanswered, {rest / whole_s:.1%} otherwise; settled"
        f" steps {mean(times[step] for step in settled if step not in disturbed) * 1e3:.1f} ms alone,"
        f" {mean(times[step] for step in settled if step in disturbed) * 1e3:.1f} ms beside the neighbour"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, action="append", help="100 and 1000 if unset")
    parser.add_argument("--steps", type=int, help="2000, or three times --every if that is more")
    parser.add_argument("--policy", action="append", help="off and measured if unset")
    parser.add_argument("--factor", type=float, default=1.8)
    parser.add_argument("--pass-ms", type=float, default=0.4, help="of a layer and microbatch")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    given = parser.parse_args(arguments, argparse.Namespace(schedule="1f1b"))
    print(
        f"{given.ranks} emulated ranks, {given.layers} equal layers, {given.microbatches} microbatches, passes of"
        f" {given.pass_ms:g} ms, rank {slow_rank(given)} {given.factor:g} times slow; {platform.machine()},"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}"
    )
    for every in given.every or (100, 1000):
        steps = given.steps or max(2000, 3 * every)
        knows = oracle(given)
        print(knows, flush=True)
        for policy in given.policy or ("off", "measured"):
            ran = run(policy, steps, neighbour(every, steps), given)
            before, knows = knows, oracle(given)
            print(f"{row(every, policy, steps, ran, before.mean(knows))}\nafterwards {knows}", flush=True)


if __name__ == "__main__":
    main()
