"""Effective training time ratio on spot traces: eight slots, one emulated rank on each live node.

    python -m benchmarks.rehearsal [--trace FILE[:A-B] ...] [--speedup X] [--nodes N] [--out FOLDER]

`freshet rehearse` replays each trace, as a user does, and `freshet verify` proves its run. `:A-B` takes only
these minutes of a trace. Without `--trace` the benchmark makes a synthetic one. The ranks train until the
trace ends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from orchestrator.cli.exit_codes import DONE, PROVED_IN_PART

SPEC = """
[job]
name = "rehearsal"
steps = 1000000
sample_tokens = 0

[model]
family = "gpt"
layers = 14
width = 16
heads = 2
context = 16

[data]
source = "python-docs"

[pipeline]
ranks = {nodes}
microbatches = 8
microbatch_size = 1

[checkpoint]
every_steps = 5

[cluster]
device = "emulated"
wait_s = 180

[cluster.emulated]
forward_s = 0.005
input_grad_s = 0.005
weight_grad_s = 0.005
"""
"""16 layers of 15 ms per microbatch: about half a second per step on eight ranks."""
SYNTHETIC = ("--synthetic", "0.15:10:5", "--window", "0-60")


def rehearse(spec: Path, arguments: list[str], out: Path) -> dict[str, Any]:
    """Run one rehearsal and return its figures."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator", "rehearse", str(spec), *arguments),
            *("--out", str(out), "--json"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def proved(out: Path) -> str:
    """Run `freshet verify` and return its last line; raises if anything is wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "verify", str(out)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode not in (DONE, PROVED_IN_PART):
        raise RuntimeError(f"{out} is not proved:\n{done.stdout}")
    return done.stdout.splitlines()[-1]


def show(name: str, numbers: dict[str, Any], proof: str) -> None:
    """Print the main figures of one rehearsal."""
    found = numbers["rehearsal"]
    print(
        f"{name}: effective training time ratio {found['ratio']:.4f} at {found['speedup']:g} x (emulated),"
        f" {found['ratio_at_speed_1']:.4f} at speed 1 from the measured loss per event",
        flush=True,
    )
    print(
        f"  {found['seconds']:.0f} s, {found['losses']} losses, {found['joins']} joins, {found['steps']} steps of"
        f" {found['step_s']:.3f} s (median), {found['rerun']} re-run, {found['steps_lost']} committed steps lost"
    )
    live = found["live_node_seconds"]
    spent = ", ".join(
        f"{use} {100 * value / live:.2f} %" for use, value in found["node_seconds"].items() if value
    )
    print(f"  of {live:.0f} node-seconds: {spent}")
    print(
        f"  per loss {found['lost_per_loss']:.1f}, per join {found['lost_per_join']:.1f} node-seconds;"
        f" seconds p50/p95/max: "
        + ", ".join(
            f"{part} {each['p50']:.2f}/{each['p95']:.2f}/{each['max']:.2f}"
            for part, each in found["recovery_s"].items()
        )
    )
    print(f"  {proof}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", action="append", default=[], metavar="FILE[:A-B]")
    parser.add_argument("--speedup", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}; one emulated rank per node")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        spec = folder / "spec.toml"
        spec.write_text(SPEC.format(nodes=options.nodes))
        traces = {trace: trace_arguments(trace) for trace in options.trace} or {"synthetic": list(SYNTHETIC)}
        for number, (name, arguments) in enumerate(traces.items(), 1):
            arguments += ["--nodes", str(options.nodes), "--speedup", f"{options.speedup:g}"]
            out = folder / f"run-{number}"
            numbers = rehearse(spec, arguments, out)
            show(Path(name).name, numbers, proved(out))


def trace_arguments(trace: str) -> list[str]:
    """The arguments of `freshet rehearse` for `FILE` or `FILE:A-B`."""
    file, colon, window = trace.rpartition(":")
    return ["--trace", file, "--window", window] if colon else ["--trace", trace]


if __name__ == "__main__":
    main()
