"""What the forest's predictions are worth: the stages that a planner gives a disturbed device with them, and without.

    python -m benchmarks.forest_choices [--windows FILE] [--draws N]

The windows are those of `freshet interference collect`: a device with a neighbour was sampled while it ran one stage,
and then ran others. A twin without a neighbour takes what is left of a job. The planner chooses the stage that
makes the slower of the two fastest: by the slowdown that was last measured ("measured"), or by what forests predict of
each stage that were fitted without this kind of neighbour ("forest"). The time of what it chose over the least time,
by what was measured next, is what counts. The planner's own code corrects the slowdown, as in a job.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.parts.targets import at_most
from orchestrator.cli.interference import collect_command
from planner.adapt.forest_slowdowns import carried_over
from planner.features import NAMES, SAMPLED
from planner.interference.dataset import Windows, measured_ratios
from planner.interference.fitting import FITTERS, left_out
from planner.interference.model_file import load_windows

Floats = NDArray[np.float64]

SHARES = 40
"""Sizes of a job for each sampled device."""
DRAWS = 2000
_WORK = NAMES.index("work")


@dataclass(frozen=True)
class Case:
    """A device as it was sampled once, and the stages that it may hold; all arrays are by stage."""

    kind: str
    """Of the neighbour."""
    work_s: Floats
    """Of a pass, alone."""
    ratios: Floats
    """The slowdowns measured next."""
    measured: float
    """The slowdown measured last, of the last of the stages."""
    forest: Floats
    """What a forest that has not seen the neighbour predicts; of the stage held too."""

    def losses(self, slowdowns: Floats) -> Floats:
        """float[SHARES]: the time of the stages chosen by `slowdowns` over the least, for jobs of several sizes."""
        whole_s = np.linspace(self.work_s.min(), 2 * self.work_s.max(), SHARES)[:, None]
        left_s = np.maximum(0.0, whole_s - self.work_s)
        chosen = np.maximum(self.work_s * slowdowns, left_s).argmin(axis=1)
        true_s = np.maximum(self.work_s * self.ratios, left_s)
        return true_s[np.arange(SHARES), chosen] / true_s.min(axis=1)


def cases(windows: Windows, seed: int) -> list[Case]:
    """The sampled devices after which every stage ran once, the one that was held last of all."""
    kinds = np.array(windows.kinds)
    predicted = left_out(windows, FITTERS["forest"], seed)
    stages = len(np.unique(windows.rows[:, _WORK]))
    of_sample: dict[bytes, list[int]] = defaultdict(list)
    for number, row in enumerate(windows.rows):
        if kinds[number] in windows.neighbours:
            of_sample[row[: len(SAMPLED)].tobytes()].append(number)
    measured = measured_ratios(windows.rows)
    return [
        Case(
            kind=str(kinds[own[0]]),
            work_s=windows.rows[own, _WORK],
            ratios=windows.ratios[own],
            measured=float(measured[own[0]]),
            forest=predicted[own],
        )
        for own in of_sample.values()
        if len(own) == stages == len(np.unique(windows.rows[own, _WORK]))
    ]


def losses(found: Sequence[Case]) -> tuple[Floats, Floats]:
    """float[cases] each: the mean time over the least, by the slowdown last measured and by the forest."""
    measured = np.array([case.losses(np.full(len(case.work_s), case.measured)).mean() for case in found])
    forest = np.array(
        [
            case.losses(
                np.array([carried_over(case.measured, each, case.forest[-1]) for each in case.forest])
            ).mean()
            for case in found
        ]
    )
    return measured, forest


def show(found: Sequence[Case], draws: int) -> None:
    measured, forest = losses(found)
    kinds = np.array([case.kind for case in found])
    for kind in sorted(set(kinds)):
        own = kinds == kind
        print(f"  {kind:<10} measured {measured[own].mean():.4f}, forest {forest[own].mean():.4f}")
    # Windows beside one neighbour resemble each other: kinds are drawn, with all of their windows.
    names = np.array(sorted(set(kinds)))
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(draws):
        rows = np.concatenate([np.flatnonzero(kinds == kind) for kind in random.choice(names, len(names))])
        ratios.append(forest[rows].mean() / measured[rows].mean())
    ratio = forest.mean() / measured.mean()
    low, high = np.quantile(ratios, [0.025, 0.975])
    print(
        f"time over the least, {len(found)} sampled devices: measured {measured.mean():.4f}, forest"
        f" {forest.mean():.4f}; {at_most(f'forest over measured {ratio:.4f}', ratio, 1.0)}, 95 % of draws of kinds"
        f" {low:.4f} to {high:.4f}; the forest's choice is faster in {np.mean(forest < measured):.0%}, slower in"
        f" {np.mean(forest > measured):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--windows", type=Path, help="of `freshet interference collect`; unset: measured now, in minutes"
    )
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=0, help="of the forests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.windows or Path(folder) / "windows"
        if given.windows is None:
            collect_command(path, rounds=None, brief=False, device="cpu")
        stored = load_windows(path)
    print(f"{len(stored.windows):,} windows; {platform.machine()}, {os.cpu_count()} cores; {date.today()}")
    show(cases(stored.windows, given.seed), given.draws)


if __name__ == "__main__":
    main()
