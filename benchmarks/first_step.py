"""From `freshet train` to the first committed step: four ranks of the main job on a local cluster.

    python -m benchmarks.first_step [--rounds N] [--set KEY=VALUE ...]

With `--set pipeline.partition=parameter` the job needs no profile. Each round starts a new cluster in a new
process, as a user does. The figure is the run's own `first_step_after_s`, which counts from the start of the
process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

SHORT = ("job.steps=3", "job.sample_tokens=0")


def first_step_s(folder: Path, overrides: Sequence[str]) -> float:
    """Seconds until the first step of one fresh run of the main job with `overrides`."""
    summary = folder / "summary.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator", "train", "examples/gpt.toml"),
            *(part for override in (*SHORT, *overrides) for part in ("--set", override)),
            *("--set", f"job.output={folder / 'run'}"),
            *("--summary", str(summary)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(summary.read_text())["first_step_after_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()
    times = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            times.append(first_step_s(Path(folder), options.overrides))
    print(
        f"first committed step after {median(times):.1f} s ({min(times):.1f} to {max(times):.1f}), four ranks"
    )


if __name__ == "__main__":
    main()
