"""How much monitoring and solving delay a job beyond the phases themselves, measured in steps.

    python -m benchmarks.monitoring [--rounds N]

Each round trains a small model on two ranks under Ray with `freeze.method = "timelyfreeze"`. The figure is
the number of steps from the end of monitoring until the solution is in force. It also includes the extra time
of timed steps and of steps during the solve, compared with those of the warm-up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from orchestrator.events import types as events
from orchestrator.events.log import read_log
from planner.freezing import Phase, Phases
from workers.protocol.reports import FreezeStarted, StepReport

PHASES = Phases(warm_up=30, monitoring=50, ramp=60)
SETTLING_STEPS = 10
"""Steps of the warm-up that don't count, because the planner starts during them."""
SETTINGS = {
    "job.steps": 80,
    "job.sample_tokens": 0,
    "model.layers": 4,
    "model.width": 128,
    "pipeline.ranks": 2,
    "pipeline.partition": '"parameter"',
    "optimizer.warmup_steps": 10,
    "freeze.method": '"timelyfreeze"',
    "freeze.warm_up": PHASES.warm_up,
    "freeze.monitoring": PHASES.monitoring,
    "freeze.ramp": PHASES.ramp,
}


@dataclass(frozen=True)
class Delay:
    """The delay of one run."""

    unfrozen_steps: int
    """Steps after monitoring, before the solution is in force."""
    timing_steps: float
    """Extra time of the unfrozen half of monitoring, in steps of the warm-up."""
    solving_steps: float
    """Extra time of the steps during which the planner solved."""
    solve_s: float
    step_s: float
    """Time of a step of the warm-up."""

    @property
    def total_steps(self) -> float:
        return self.unfrozen_steps + max(0.0, self.timing_steps) + max(0.0, self.solving_steps)


def train(folder: Path) -> Path:
    """Train once in `folder` and return the path of the event log."""
    overrides = {**SETTINGS, "job.output": f'"{folder / "run"}"'}
    options = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    subprocess.run(
        [sys.executable, "-m", "orchestrator", "train", "examples/gpt.toml", *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder / "run" / "events.jsonl"


def delay(path: Path) -> Delay:
    """The delay that the log at `path` shows."""
    seen = [record.event for record in read_log(path)]
    step_s = {event.step: event.step_s for event in seen if isinstance(event, StepReport)}
    start = next(event.plan.start for event in seen if isinstance(event, FreezeStarted))
    solve_s = next(event.solve_s for event in seen if isinstance(event, events.FreezeSolved))
    assert start is not None
    usual_s = median(step_s[step] for step in range(SETTLING_STEPS + 1, PHASES.warm_up + 1))
    timed = [seconds for step, seconds in step_s.items() if PHASES.of(step) is Phase.UPPER]
    solving = [step_s[step] for step in range(PHASES.monitoring + 1, start)]
    return Delay(
        unfrozen_steps=start - PHASES.monitoring - 1,
        timing_steps=(sum(timed) - len(timed) * usual_s) / usual_s,
        solving_steps=(sum(solving) - len(solving) * usual_s) / usual_s,
        solve_s=solve_s,
        step_s=usual_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    delays = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            delays.append(delay(train(Path(folder))))
        last = delays[-1]
        print(
            f"{last.unfrozen_steps} steps until the solution was in force (solved in {last.solve_s * 1e3:.0f} ms, a"
            f" step takes {last.step_s * 1e3:.0f} ms); timing cost {last.timing_steps:+.2f} steps, solving"
            f" {last.solving_steps:+.2f}",
            flush=True,
        )
    print(f"beyond the phases: {median(each.total_steps for each in delays):.2f} steps")


if __name__ == "__main__":
    main()
