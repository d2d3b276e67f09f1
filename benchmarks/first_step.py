"""From `freshet train` to the first committed step: four ranks of the main job on a local cluster; and what of it the
comparison of layers with plain autograd takes.

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from orchestrator.spec.job_spec import load
from workers.build import build_layers
from workers.data.registry import open_dataset
from workers.layer_check.check import LayerCheck
from workers.models.registry import build_definition
from workers.profiling.counted_memory import LiveStorages
from workers.state.optim import make_optimizer

SHORT = ("job.steps=3", "job.sample_tokens=0")


@dataclass(frozen=True)
class Start:
    """One start of the main job."""

    first_step_s: float
    checked_s: float
    """Of it, the comparison of layers, on the rank where it took longest."""


def start(folder: Path, overrides: Sequence[str]) -> Start:
    """One fresh run of the main job with `overrides`, until its first step."""
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
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    checked_s: dict[int, float] = defaultdict(float)
    for event in events:
        if event["event"] == "LayersChecked":
            checked_s[event["rank"]] += event["seconds"]
    return Start(json.loads(summary.read_text())["first_step_after_s"], max(checked_s.values()))


def check_bytes(folder: Path) -> tuple[int, int]:
    """The most memory that the comparison of any layer takes beside what lives anyway, and what the rank that does it
    has live in a step, if each rank holds two layers and each layer four microbatches."""
    spec = load(Path("examples/gpt.toml"), [f"job.output={folder / 'run'}"])
    data = open_dataset(spec.data, spec.model, str(folder))
    definition = build_definition(spec.model, data.vocabulary)
    optimizer = make_optimizer(spec.optimizer, 1)
    batch = data.dataset.train(list(range(spec.pipeline.microbatch_size)))
    tensors, most, in_a_step = batch.inputs, 0, 0
    for index in range(len(definition.layers) - 1):
        ((layer, state),) = build_layers(
            definition, [index], seed=0, precision="float32", device=torch.device("cpu"), optimizer=optimizer
        ).values()
        with LiveStorages() as live:
            live.add([*layer.module.parameters(), *tensors])
            live.restart()
            before = live.live_bytes
            LayerCheck(print, "float32").compare(layer, tensors, 1, 0)
            most = max(most, live.peak_bytes - before)
            before = live.live_bytes
            kept = [layer.forward(tensors, 1, keep=True) for _ in range(4)]
            states = 4 * sum(weight.nbytes for weight in state.weights.values())
            in_a_step = max(in_a_step, 2 * (live.live_bytes - before + states))
            tensors = kept[0][0]
    return most, in_a_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()
    starts = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            starts.append(start(Path(folder), options.overrides))
    times = [each.first_step_s for each in starts]
    print(
        f"first committed step after {median(times):.1f} s ({min(times):.1f} to {max(times):.1f}), four ranks"
    )
    shares = [each.checked_s / each.first_step_s for each in starts]
    print(
        f"comparison of layers with plain autograd: {1e3 * median(each.checked_s for each in starts):.0f} ms,"
        f" {100 * median(shares):.2f} % of it ({100 * min(shares):.2f} to {100 * max(shares):.2f})"
    )
    with tempfile.TemporaryDirectory() as folder:
        most, in_a_step = check_bytes(Path(folder))
    print(
        f"its memory: {most / 1e6:.1f} MB for a moment, beside {in_a_step / 1e6:.1f} MB that a rank has in a step"
    )


if __name__ == "__main__":
    main()
