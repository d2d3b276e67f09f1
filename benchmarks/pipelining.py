"""Throughput against `torch.distributed.pipelining`, in one run: same model, shapes, optimizer, transport,
ranks.

    python -m benchmarks.pipelining [--schedules gpipe,1f1b,interleaved,zbv] [--rounds N] [--steps N]

Our rounds and theirs alternate. A round's figure is the median of its steps after the first two. The printed
ratio is the median over rounds of our throughput over theirs.
"""

from __future__ import annotations

import argparse
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.parts.two_rank_job import RANKS, WARM_UP, make_job
from workers.build import build_module
from workers.data.registry import open_dataset
from workers.data.sampling import train_indices
from workers.launch.processes import forkserver
from workers.launch.ranks import Job, run_processes
from workers.models.registry import build_definition
from workers.protocol import StepReport


def ours(job: Job) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step with our engine."""
    reports = [r for r in run_processes(job).reports if isinstance(r, StepReport)]
    return [r.step_s for r in reports], [r.loss for r in reports]


def _their_rank(job: Job, rank: int, port: int, pipe: Connection) -> None:
    from time import perf_counter

    from torch.distributed import pipelining

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config, plan = job.config, job.plan
    data = open_dataset(config.data, config.model, config.output)
    definition = build_definition(config.model, data.vocabulary)
    stages, modules = [], []
    for stage, (first, stop) in enumerate(plan.layers):
        if plan.stage_ranks[stage] == rank:
            module = nn.Sequential(*(build_module(definition, i, config.seed) for i in range(first, stop)))
            modules.append(module)
            stages.append(pipelining.PipelineStage(module, stage, len(plan.layers), torch.device("cpu")))
    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return definition.loss(logits, targets)

    given = stages[0] if job.plan.chunks == 1 else stages
    schedule = kinds[plan.schedule](given, config.microbatches, loss_fn=loss_fn)
    parameters = [p for m in modules for p in m.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.optimizer.lr, betas=(config.optimizer.beta1, config.optimizer.beta2)
    )
    holds_last = plan.stage_ranks[-1] == rank
    times, losses = [], []
    for step in range(config.steps):
        begun_s = perf_counter()
        batches = [
            data.dataset.train(
                train_indices(
                    config.seed,
                    step,
                    m,
                    config.microbatches,
                    config.microbatch_size,
                    data.dataset.train_samples,
                )
            )
            for m in range(config.microbatches)
        ]
        inputs = torch.cat([b.inputs[0] for b in batches])
        targets = torch.cat([b.targets[0] for b in batches])
        found: list[Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        if holds_last:
            schedule.step(*arguments, target=targets, losses=found)
        else:
            schedule.step(*arguments)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(perf_counter() - begun_s)
        losses.append(sum(float(x.detach()) for x in found) / len(found) if found else 0.0)
    pipe.send((times, losses, holds_last))
    dist.barrier()
    dist.destroy_process_group()


def theirs(job: Job) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step with torch.distributed.pipelining."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context: Any = forkserver()
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=_their_rank, args=(job, rank, port, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    losses = next(losses for _, losses, last in results if last)
    return results[0][0], losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zbv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}; two ranks, one thread each; {options.rounds} rounds of {options.steps} steps"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in options.schedules.split(","):
            job = make_job(name, options.steps, Path(folder))
            ratios, our_times, their_times = [], [], []
            for _ in range(options.rounds):
                our_s, our_losses = ours(job)
                their_s, their_losses = theirs(job)
                apart = max(abs(a - b) for a, b in zip(our_losses, their_losses, strict=True))
                assert apart < 1e-3, f"{name}: the losses are {apart} apart: not the same training"
                our_times.append(median(our_s[WARM_UP:]))
                their_times.append(median(their_s[WARM_UP:]))
                ratios.append(their_times[-1] / our_times[-1])
            print(
                f"{name:12} ours {median(our_times):.3f} s/step, theirs {median(their_times):.3f} s/step,"
                f" throughput ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
