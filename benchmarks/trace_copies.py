"""What copies save on spot traces: the losses that take the last holder of a layer, and the time that they undo.

    python -m benchmarks.trace_copies [--trace FILE ...] [--every-min M]

A job of 64 layers has one rank on each node of the trace. What goes at one time goes in one instant. No job runs: plans
and places of copies are those of the planner. Without a trace it makes one up in which nodes go in groups.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from orchestrator.rehearsal.copies_saved import copies_saved, group_losses
from orchestrator.rehearsal.synthetic_trace import Preemption, synthetic
from orchestrator.rehearsal.traces import NodeTrace, parse
from planner.schedule.registry import build
from planner.search.replan import Replanner
from planner.search.unmeasured import unmeasured_plan

LAYERS, MICROBATCHES, MOST_COPIES = 64, 32, 3


def traces(paths: list[Path]) -> Iterator[tuple[str, NodeTrace]]:
    """Each trace with its name."""
    for path in paths:
        yield path.name, parse(path.read_text(encoding="utf-8"), str(path))
    if not paths:
        preemption = Preemption(probability=0.1, every_min=10.0, back_min=10.0)
        yield "synthetic 0.1:10, 16 nodes, a day", synthetic(16, preemption, 24 * 60.0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--every-min", type=int, default=7, help="minutes between checkpoints")
    options = parser.parse_args()
    for name, trace in traces(options.trace):
        ranks = min(trace.most, LAYERS)
        schedule = build("1f1b", ranks, MICROBATCHES, 1)
        first = unmeasured_plan(schedule, (1,) * LAYERS, replicas=1)
        replanner = Replanner(first=first, schedule=schedule, parameters=(1,) * LAYERS, copies=MOST_COPIES)
        losses = group_losses(trace, replanner)
        sizes = sorted(Counter(len(loss.nodes) for loss in losses).items())
        told = ", ".join(f"{count} of {size}" for size, count in sizes)
        print(f"{name}: {ranks} ranks, {len(losses)} losses by the nodes that go at once: {told}")
        # With one step in a second of the trace, steps are seconds.
        found = copies_saved(trace, replanner, steps_per_s=1.0, every_steps=60 * options.every_min)
        for saved in found:
            print(
                f"  copies = {saved.copies}: {saved.last_holders} losses take the last holder of a layer,"
                f" {saved.steps_lost / 60:.0f} of {trace.end_ms / 60e3:.0f} minutes undone"
            )


if __name__ == "__main__":
    main()
