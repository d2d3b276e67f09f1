"""Whether LLaMA fits and what its copies cost on clusters that nobody has at hand: plans from shapes and data sheets.

    python -m benchmarks.on_paper [--device h100] [--only "7 B"]

LLaMA 7 B on 8, 13 B on 16 and 70 B on 64 devices of 80 GB, with 400 and with 25 Gbit/s between any two, in 16 bits; 7 B
also as two replicas, with whole optimizer states and with shards, and without copies as two and as eight replicas, with
shards of states and of sums of gradients.
Per row: the step, what its copies add to it, the fullest rank's memory by part, and the share of the devices' published
rate that 6 multiplications per parameter and token take (MFU).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.parts.settled_job import without_plan
from benchmarks.parts.targets import at_most
from orchestrator.prepare.on_paper import PaperCluster, paper_profile
from orchestrator.prepare.planning import first_plan
from orchestrator.quantities import percent, seconds, size
from orchestrator.spec.job_spec import load
from workers.protocol.errors import JobError

SPEC = Path("examples/llama-7b.toml")
NETWORKS_GBIT = (400.0, 25.0)
MOST = 0.03
"""Share of a step that copies may cost on the faster network."""


@dataclass(frozen=True)
class Size:
    """A model, and what it is planned on."""

    name: str
    devices: int
    overrides: tuple[str, ...] = ()


def sharing(replicas: int, shard: str) -> tuple[str, ...]:
    """With as many samples in a step as one pipeline's, and no copies."""
    return (
        f"pipeline.replicas={replicas}",
        f"pipeline.microbatches={64 // replicas}",
        f"pipeline.shard={shard}",
        "elastic.redundancy=checkpoint",
    )


REPLICAS = ("pipeline.replicas=2", "pipeline.microbatches=32")
SIZES = (
    Size("7 B", 8),
    Size("7 B whole", 8, REPLICAS),
    Size("7 B shards", 8, (*REPLICAS, "pipeline.shard=optimizer")),
    *(
        Size(f"7 B {8 // replicas} x {replicas} {shard}", 8, sharing(replicas, shard))
        for replicas in (2, 8)
        for shard in ("optimizer", "gradients")
    ),
    Size(
        "13 B",
        16,
        (
            "model.layers=40",
            "model.width=5120",
            "model.heads=40",
            "model.hidden=13824",
            "pipeline.ranks=16",
            "pipeline.microbatches=128",
        ),
    ),
    Size(
        "70 B",
        64,
        (
            "model.layers=80",
            "model.width=8192",
            "model.heads=64",
            "model.kv_heads=8",
            "model.hidden=28672",
            "model.context=4096",
            "pipeline.ranks=64",
            "pipeline.microbatches=256",
            "pipeline.recompute=true",
        ),
    ),
)


def row(which: Size, device: str, gigabits: float) -> None:
    spec, found = without_plan(load(SPEC, which.overrides), gpus=math.inf)
    cluster = PaperCluster.parse(f"{which.devices}x{device}", f"{gigabits:g}")
    begun_s = time.perf_counter()
    profile = paper_profile(spec, len(found.layers), cluster)
    profiled_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    title = f"LLaMA {which.name}, {cluster}"
    try:
        choice = first_plan(spec, profile)
    except JobError as error:
        print(f"{title}: MISSED, {error}")
        return
    planned_s = time.perf_counter() - begun_s
    plan, prediction = choice.plan, choice.prediction
    cost = prediction.redundancy
    share = cost.seconds_per_step / (prediction.step_s - cost.seconds_per_step)
    text = f"{seconds(cost.seconds_per_step)} of it for copies, {100 * share:.1f} % more"
    told = at_most(text, 100 * share, 100 * MOST) if gigabits == max(NETWORKS_GBIT) else text
    tokens = plan.replicas * plan.microbatches * profile.model.microbatch_size * spec.model.context
    flops = 6 * sum(found.parameters) * tokens
    mfu = flops / (prediction.step_s * which.devices * cluster.accelerator.half_flops)
    fullest = max(prediction.memory.ranks, key=lambda rank: rank.peak.total).peak
    parts = ", ".join(f"{part} {size(count)}" for part, count in asdict(fullest).items() if count)
    print(
        f"{title}: {plan.schedule}, {plan.pipeline_ranks} stages x {plan.replicas}, {tokens:,} tokens a step:"
        f" {seconds(prediction.step_s)}, {told};"
        f" bubble {percent(prediction.bubble)}, MFU {percent(mfu)}; fullest rank {size(fullest.total)} of"
        f" {size(cluster.accelerator.memory_bytes)}: {parts} (profile {profiled_s:.0f} s, plan {planned_s:.0f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h100", help="as in freshet plan --on")
    parser.add_argument("--only", choices=[which.name for which in SIZES])
    arguments = parser.parse_args()
    for which in SIZES:
        if arguments.only not in (None, which.name):
            continue
        for gigabits in NETWORKS_GBIT:
            row(which, arguments.device, gigabits)


if __name__ == "__main__":
    main()
