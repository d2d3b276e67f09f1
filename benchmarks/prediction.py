"""Simulated over measured step time on two real ranks, for every schedule family.

    python -m benchmarks.prediction [--rounds N] [--steps N]

Each round is one run: costs per (kind, stage), and what a step spends outside its window, are medians over its even
steps; the simulated step is held against the median of its odd steps. The message time is measured by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipelining import WARM_UP, make_job
from planner.ir import Action, Kind, Schedule
from planner.simulate import Costs, simulate
from workers.launch import Job, run_processes
from workers.protocol import Generation, StepReport, TimelineReport
from workers.transport.channel import Stream
from workers.transport.process_group import ProcessGroupChannel

FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def costs_of(schedule: Schedule, reports: list[TimelineReport], communication_s: float) -> Costs:
    """Median seconds of each kind of action on each stage."""
    seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for report in reports:
        for span in report.spans:
            action = Action.parse(span.action)
            seen[action.kind, action.stage].append(span.end_s - span.start_s)
    kinds = {kind for kind, _ in seen}
    return Costs(
        {kind: tuple(median(seen[kind, stage]) for stage in range(schedule.stages)) for kind in kinds},
        communication_s,
    )


def measure(job: Job) -> tuple[list[float], list[TimelineReport]]:
    """After the warm-up: the times of the odd steps, the timelines of the even ones."""
    reports = run_processes(job).reports
    steps = [r.step_s for r in reports if isinstance(r, StepReport) and r.step > WARM_UP and r.step % 2]
    timelines = [r for r in reports if isinstance(r, TimelineReport) and r.step > WARM_UP]
    return steps, [r for r in timelines if r.step % 2 == 0]


def outside_window_s(reports: list[TimelineReport]) -> float:
    """What a step spends after the last action of any rank: exchange, commit, update."""
    by_step: dict[int, list[TimelineReport]] = defaultdict(list)
    for report in reports:
        by_step[report.step].append(report)
    return median(
        max(r.step_s for r in ranks) - max(span.end_s for r in ranks for span in r.spans)
        for ranks in by_step.values()
    )


def _ping(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    generation = Generation(
        number=1, epoch=1, members=(0, 1), store_host="127.0.0.1", store_port=port, timeout_s=60.0
    )
    channel = ProcessGroupChannel(generation, rank, torch.device("cpu"))
    there, back = Stream(0, 1, 0, "there"), Stream(1, 0, 0, "back")
    message = (torch.zeros(4, 128, 256),)
    times = []
    for _ in range(100):
        begun_s = perf_counter()
        if rank == 0:
            channel.expect(back, 1)
            channel.send(there, message)
            channel.receive(back)
        else:
            channel.expect(there, 1)
            channel.send(back, channel.receive(there))
        channel.flush()
        times.append((perf_counter() - begun_s) / 2)
    pipe.send(median(times[10:]))
    pipe.recv()
    channel.close()


def message_s() -> float:
    """One boundary activation from rank to rank, over the channel that training uses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "workers.rank"])
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe()
        process = context.Process(target=_ping, args=(rank, store.port, there))
        process.start()
        pipes.append(here)
        processes.append(process)
    times = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("close")
    for process in processes:
        process.join()
    return times[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    communication_s = message_s()
    print(
        f"torch {torch.__version__}; two ranks, one thread each;"
        f" a boundary message takes {communication_s * 1e3:.2f} ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in FAMILIES:
            job = make_job(name, options.steps, Path(folder), timeline_every=1)
            ratios, measured = [], []
            for _ in range(options.rounds):
                steps, timelines = measure(job)
                simulated = simulate(job.schedule, costs_of(job.schedule, timelines, communication_s))
                predicted_s = simulated.makespan_s + outside_window_s(timelines)
                measured.append(median(steps))
                ratios.append(predicted_s / measured[-1])
            print(
                f"{name:12} measured {median(measured):.3f} s/step, simulated over measured {median(ratios):.3f}"
                f" ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
