"""Throughput against `torch.distributed.pipelining`, in one run: same model, shapes, optimizer, transport,
ranks.

    python -m benchmarks.pipelining [--schedules gpipe,1f1b,interleaved,zbv] [--rounds N] [--steps N]

Our rounds and theirs alternate. A round's figure is the median of its steps after the first two. The printed
ratio is the median over rounds of our throughput over theirs. Below it, where a step goes on each rank: forward and
backward passes by block and microbatch (embedding, head and loss count with the blocks beside them), the end of the
step after the last of them (ours: norms, commit, update; theirs: update, barrier), and the rest, in which it waits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.parts.forked_answers import forked_answers
from benchmarks.parts.two_rank_job import RANKS, WARM_UP, make_job
from planner.ir import Action, ActionKind
from workers.build import build_module
from workers.data.registry import open_dataset
from workers.data.sampling import samples_at
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport, TimelineReport

PARTS = ("forward", "backward", "end", "rest")


@dataclass
class Parts:
    """Where the steps of one rank go: per step, seconds of each part."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def add(self, step_s: float, forward_s: float, backward_s: float, end_s: float) -> None:
        parts = (forward_s, backward_s, end_s, step_s - forward_s - backward_s - end_s)
        for part, taken_s in zip(PARTS, parts, strict=True):
            self.seconds[part].append(taken_s)

    def middle_ms(self, part: str) -> float:
        return 1e3 * median(self.seconds[part][WARM_UP:])


def parts_text(rounds: Sequence[Parts], passes: int) -> str:
    """Where the steps of one rank go, of which `passes` of a block are a part; medians over rounds."""
    middle = {part: median(parts.middle_ms(part) for parts in rounds) for part in PARTS}
    return (
        f"forward {middle['forward'] / passes:.2f}, backward {middle['backward'] / passes:.2f} ms per block and"
        f" microbatch; end {middle['end']:.1f}, rest {middle['rest']:.1f} ms"
    )


@dataclass
class Run:
    """One run: seconds and loss of each step, and the parts by rank."""

    taken_s: list[float]
    losses: list[float]
    parts: list[Parts]


def ours(job: LaunchedJob) -> Run:
    """With our engine."""
    found = run_processes(job).reports
    reports = [r for r in found if isinstance(r, StepReport)]
    parts = [Parts() for _ in range(RANKS)]
    for timeline in sorted((r for r in found if isinstance(r, TimelineReport)), key=lambda r: r.step):
        of_kind = dict.fromkeys(ActionKind, 0.0)
        for span in timeline.spans:
            of_kind[Action.parse(span.action).kind] += span.end_s - span.start_s
        forward_s = of_kind.pop(ActionKind.FORWARD)
        end_s = timeline.step_s - timeline.spans[-1].end_s
        parts[timeline.rank].add(timeline.step_s, forward_s, sum(of_kind.values()), end_s)
    return Run([r.step_s for r in reports], [r.loss for r in reports], parts)


class Contiguous(torch.autograd.Function):
    """The same tensor, and the same gradient, contiguous in memory: torch.distributed sends no other ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad.contiguous()


class ContiguousEnds(nn.Module):
    """A stage whose input's gradient and whose output are contiguous.

    Args:
        stage: takes one tensor.
        first: its input carries no gradient.
    """

    def __init__(self, stage: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.stage = stage
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.stage(x if self.first else Contiguous.apply(x))
        return found.contiguous()


class Clock:
    """Adds up the seconds that functions take."""

    def __init__(self) -> None:
        self.taken_s = 0.0
        self.last_s = 0.0
        """When the newest call ended."""

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun_s = perf_counter()
            result = function(*args, **kwargs)
            self.last_s = perf_counter()
            self.taken_s += self.last_s - begun_s
            return result

        return call


def _their_rank(job: LaunchedJob, rank: int, port: int, pipe: Connection) -> None:
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config, plan = job.config, job.plan
    data = open_dataset(config.data, config.model, config.job.folder)
    definition = build_definition(config.model, data.vocabulary)
    stages, modules = [], []
    forward, backward, parts = Clock(), Clock(), Parts()
    for stage, (first, stop) in enumerate(plan.layers):
        if plan.stage_ranks[stage] == rank:
            module = nn.Sequential(
                *(build_module(definition, i, config.job.seed) for i in range(first, stop))
            )
            modules.append(module)
            whole = ContiguousEnds(module, first=stage == 0)
            made: Any = pipelining.PipelineStage(whole, stage, len(plan.layers), torch.device("cpu"))
            made.forward_one_chunk = forward.timed(made.forward_one_chunk)
            made.backward_one_chunk = backward.timed(made.backward_one_chunk)
            made.backward_weight_one_chunk = backward.timed(made.backward_weight_one_chunk)
            stages.append(made)
    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return definition.loss(logits, targets)

    given = stages[0] if job.plan.chunks == 1 else stages
    schedule = kinds[plan.schedule](given, config.microbatches, loss_fn=forward.timed(loss_fn))
    parameters = [p for m in modules for p in m.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.optimizer.lr, betas=(config.optimizer.beta1, config.optimizer.beta2)
    )
    holds_last = plan.stage_ranks[-1] == rank
    times, losses, course = [], [], config.course()
    for step in range(config.job.steps):
        forward.taken_s = backward.taken_s = 0.0
        begun_s = perf_counter()
        batches = [
            data.dataset.train(
                samples_at(config.job.seed, course.positions(step + 1, m), data.dataset.train_samples)
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
        ended_s = perf_counter()
        times.append(ended_s - begun_s)
        parts.add(times[-1], forward.taken_s, backward.taken_s, ended_s - backward.last_s)
        losses.append(sum(float(x.detach()) for x in found) / len(found) if found else 0.0)
    pipe.send((times, losses, holds_last, parts))
    dist.barrier()
    dist.destroy_process_group()


def theirs(job: LaunchedJob) -> Run:
    """With torch.distributed.pipelining."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = forked_answers(_their_rank, ((job, rank, port) for rank in range(RANKS)))
    losses = next(losses for _, losses, last, _ in results if last)
    return Run(results[0][0], losses, [parts for *_, parts in results])


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
            job = make_job(name, options.steps, Path(folder), timeline_every=1)
            passes = job.config.model.layers // RANKS * job.config.microbatches
            ratios, our_times, their_times = [], [], []
            our_parts: list[list[Parts]] = [[] for _ in range(RANKS)]
            their_parts: list[list[Parts]] = [[] for _ in range(RANKS)]
            for number in range(options.rounds):
                # Each comes first in every other round.
                runs = {side: side(job) for side in ((ours, theirs) if number % 2 == 0 else (theirs, ours))}
                own, other = runs[ours], runs[theirs]
                apart = max(abs(a - b) for a, b in zip(own.losses, other.losses, strict=True))
                assert apart < 1e-3, f"{name}: the losses are {apart} apart: not the same training"
                our_times.append(median(own.taken_s[WARM_UP:]))
                their_times.append(median(other.taken_s[WARM_UP:]))
                ratios.append(their_times[-1] / our_times[-1])
                for rank in range(RANKS):
                    our_parts[rank].append(own.parts[rank])
                    their_parts[rank].append(other.parts[rank])
            print(
                f"{name:12} ours {median(our_times):.3f} s/step, theirs {median(their_times):.3f} s/step,"
                f" throughput ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )
            for rank in range(RANKS):
                print(f"  rank {rank} ours:   {parts_text(our_parts[rank], passes)}")
                print(f"  rank {rank} theirs: {parts_text(their_parts[rank], passes)}", flush=True)


if __name__ == "__main__":
    main()
