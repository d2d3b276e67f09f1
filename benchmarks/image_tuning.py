"""Fine-tuning on images in the papers' form: throughput, metrics, time to the target.

    python -m benchmarks.image_tuning [--models vit,convnext] [--set KEY=VALUE ...]

`examples/finetune-vit.toml` with the ViT and the ConvNeXt-V2 that `examples/small_vision.py` makes, each as `freshet
train` runs it: two ranks on a local cluster, until the accuracy on the held-out digits is that of `job.stop_at`. The
time to it is from the first committed step to the validation that reached it; samples per second are over the same
steps, validations included.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.parts.targets import at_least
from orchestrator.spec.job_spec import load

EXAMPLE = Path("examples/finetune-vit.toml")
MODELS = {"vit": "small-vit", "convnext": "small-convnext"}


@dataclass(frozen=True)
class Tuning:
    """One run."""

    steps: int
    seconds: float
    samples_per_s: float
    metrics: dict[str, float]


def tune(model: Path, digits: Path, output: Path, overrides: Sequence[str]) -> Tuning:
    """A run of the example with a model."""
    given = (f"model.path={model}", f"data.path={digits}", f"job.output={output}", *overrides)
    subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator", "train", str(EXAMPLE)),
            *(part for override in given for part in ("--set", override)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepReport"]
    last: dict[str, Any] = next(event for event in reversed(events) if event["event"] == "ValidationReport")
    seconds = last["time_s"] - steps[0]["committed_s"]
    samples = sum(step["samples"] for step in steps[1:])
    return Tuning(last["step"], seconds, samples / seconds, last["metrics"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {date.today()}")
    target = load(EXAMPLE, options.overrides).job.target
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        runpy.run_path("examples/small_vision.py")["main"](made)
        for name in options.models.split(","):
            run = tune(made / MODELS[name], made / "digits", made / f"run-{name}", options.overrides)
            text = (
                f"{name}: {run.steps} steps, {run.samples_per_s:.0f} samples/s, {run.seconds:.1f} s; "
                + ", ".join(f"{metric} {value:.4f}" for metric, value in run.metrics.items())
            )
            if target is not None:
                text = at_least(text, run.metrics[target.metric], target.value)
            print(text, flush=True)


if __name__ == "__main__":
    main()
