"""Freezing from the input up on one rank: the measured step beside the one that the profile predicts.

    python -m benchmarks.prefix [--layers N] [--width N] [--rounds N] [--steps N]

One run: some steps with nothing frozen, then some with one more block frozen, and so on, as often as there are rounds;
the last block is always trained. So the steps that are compared are neighbours in one process. The prediction is the
unfrozen step as measured, times what the planner predicts with that prefix over what it predicts with none.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.one_rank import one_rank_job
from benchmarks.parts.configs import changed
from benchmarks.parts.targets import at_least, at_most
from benchmarks.parts.two_rank_job import profile_of
from planner.profile import Profile
from planner.simulation.predict import predict
from workers.config import FreezeConfig
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.reports import StepReport

MOST_APART, SETTLES = 0.03, 1
"""Largest relative difference of the measured step from the predicted one; steps after a change that no figure
counts."""


def schedule(blocks: int, steps: int, rounds: int) -> tuple[tuple[int, int], ...]:
    """(step, layers): nothing, then the first layer with one block, and so on, `steps` steps each."""
    prefixes = [0, *range(2, blocks + 1)] * rounds
    return tuple((1 + steps * number, prefix) for number, prefix in enumerate(prefixes))


def share_left(profile: Profile, job: LaunchedJob, prefix: int) -> float:
    """The predicted step with so many layers frozen over the predicted one with none."""
    whole, left = (
        predict(profile.with_prefix(layers), job.plan, job.schedule).step_s for layers in (0, prefix)
    )
    return left / whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6, help="blocks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="steps with each prefix in a round")
    given = parser.parse_args()
    plan = schedule(given.layers, given.steps, given.rounds)
    with tempfile.TemporaryDirectory() as folder:
        steps = given.steps * len(plan)
        job = one_rank_job(steps, Path(folder), given.layers, given.width, "float32", gpu=False)
        freeze = FreezeConfig(method="prefix", schedule=plan, cache="off")
        profile = profile_of(job)
        frozen = replace(job, config=changed(job.config, freeze=freeze))
        reports = [report for report in run_processes(frozen).reports if isinstance(report, StepReport)]
    taken: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        number, at = divmod(report.step - 1, given.steps)
        if at >= SETTLES:
            taken[plan[number][1]].append(report.step_s)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {date.today()}; {given.layers} blocks")
    unfrozen_s = median(taken[0])
    for prefix, of_prefix in sorted(taken.items()):
        step_s, predicted_s = median(of_prefix), unfrozen_s * share_left(profile, job, prefix)
        text = f"{prefix} of {given.layers + 2} layers frozen: {1e3 * step_s:.0f} ms, predicted {1e3 * predicted_s:.0f}"
        if not prefix:
            print(text)
            continue
        over = step_s / predicted_s
        print(at_most(f"{text}; over predicted {over:.3f}", abs(over - 1.0), MOST_APART))
        print(at_least(f"  over none {unfrozen_s / step_s:.3f} times as fast", unfrozen_s / step_s, 1.0))


if __name__ == "__main__":
    main()
