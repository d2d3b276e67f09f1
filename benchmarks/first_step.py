"""From `freshet train` to the first committed step: four ranks of the main job on a local cluster.

    python -m benchmarks.first_step [--rounds N]

Each round starts a new cluster in a new process, as a user does; the figure is the run's own `first_step_after_s`,
counted from the start of the process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def first_step_s(folder: Path) -> float:
    """Seconds until the first step of one fresh run."""
    summary = folder / "summary.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator", "train", "examples/gpt.toml"),
            *(
                "--set",
                "job.steps=3",
                "--set",
                "job.sample_tokens=0",
                "--set",
                f"job.output={folder / 'run'}",
            ),
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
    options = parser.parse_args()
    times = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            times.append(first_step_s(Path(folder)))
    print(
        f"first committed step after {median(times):.1f} s ({min(times):.1f} to {max(times):.1f}), four ranks"
    )


if __name__ == "__main__":
    main()
