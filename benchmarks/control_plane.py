"""From the word of a failure to the assignments of the next generation, for 8 to 1,000 ranks that are made up.

    python -m benchmarks.control_plane [--ranks N ...] [--losses N] [--deep]

The controller is the real one: event loop, lifecycle, recovery, planning, view, log on disk. Its ranks only answer, at
once, in the same process; each call and each answer is pickled and read again, as on a wire, which is in the time. What
is not: Ray, the network, the checks whether a process still listens.

One rank is killed, in a step or in its commit; half of the others then lack the commit's records. Plans for the next
failure were made ahead, as they are soon after a generation forms; how long that takes is shown, and so is a plan that
was not. Jobs have pipelines of eight ranks with two layers each; `--deep`: one pipeline, with two layers on each rank.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from unittest.mock import patch

import ray

from benchmarks.parts.answering_ranks import AnsweringHosts
from benchmarks.parts.targets import at_most
from orchestrator.cluster.actor_arguments import in_pieces
from orchestrator.controller import actor
from orchestrator.controller.actor import Controller
from orchestrator.controller.config import ControllerConfig
from orchestrator.lifecycle.states import Order, Training
from planner.plan import Plan
from planner.schedule.registry import build
from planner.search.replan import Replanner
from planner.search.unmeasured import unmeasured_plan
from workers.config import ClusterConfig, ElasticConfig, JobConfig, PipelineConfig, WorkerConfig

RANKS = (8, 64, 512, 1000)
PIPELINE_RANKS, LAYERS_PER_RANK, MICROBATCHES = 8, 2, 8
PARAMETERS = 1000
"""Of each layer."""
MOST_S = 0.5
"""Asked of 1,000 ranks."""
MOST_GROWTH = 1.1
"""Asked of the bytes per rank, over those with eight ranks; numbers of four digits take a byte more than short ones."""
NAME = "made-up"
STEPS = 1_000_000
LIMIT_S = 600.0


@dataclass(frozen=True)
class Loss:
    """One rank's loss."""

    took_s: float
    """From the word of it to the last assignment."""
    ahead_s: float
    """What making plans ahead had taken."""
    plan_s: float
    """What making its plan would have taken."""
    sent_bytes: float
    """To a rank that knew of the commit, mean."""
    records_bytes: float
    """Sent beyond that to a rank that did not, mean."""
    received_bytes: float
    """From a rank that is not asked for records, mean."""


def plan_of(ranks: int, *, deep: bool) -> Plan:
    """The first plan of a job of so many ranks."""
    pipeline = ranks if deep else PIPELINE_RANKS
    schedule = build("1f1b", pipeline, MICROBATCHES)
    return unmeasured_plan(schedule, (PARAMETERS,) * LAYERS_PER_RANK * pipeline, replicas=ranks // pipeline)


def job_of(folder: Path, plan: Plan) -> tuple[Order, ControllerConfig]:
    """A job that begins with `plan`."""
    schedule = build("1f1b", plan.pipeline_ranks, MICROBATCHES)
    elastic = ElasticConfig(redundancy="peer", notices=())
    config = WorkerConfig(
        job=JobConfig(name=NAME, steps=STEPS, timeline_every=0, sample_tokens=0, output=str(folder)),
        pipeline=PipelineConfig(microbatch_size=1, microbatches=plan.microbatches, replicas=plan.replicas),
        cluster=ClusterConfig(device="cpu", wait_s=LIMIT_S, timeout_s=LIMIT_S),
        elastic=elastic,
    )
    parameters = (PARAMETERS,) * plan.layers[-1][1]
    setup = ControllerConfig(
        config=config,
        marker=None,
        replanner=Replanner(first=plan, schedule=schedule, parameters=parameters, copies=1),
        secret=b"",
    )
    order = Order(
        job=NAME,
        epoch=1,
        generation=1,
        plan=plan,
        schedule=schedule,
        checkpoints=(),
        timeout_s=LIMIT_S,
        elastic=elastic,
    )
    return order, setup


@asynccontextmanager
async def training(folder: Path, plan: Plan, hosts: AnsweringHosts) -> AsyncIterator[Controller]:
    """A job that trains, under its controller."""
    order, setup = job_of(folder, plan)
    alone = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    with (
        patch.object(ray, "get_runtime_context", lambda: alone),
        patch.object(actor, "RayHosts", lambda setup, own: hosts),
        patch.object(actor, "reap", lambda job: None),
    ):
        controller = Controller(*in_pieces(order, setup, {"job": {"name": NAME, "steps": STEPS}}))
        await controller.start()
    try:
        await until(lambda: hosts.trains == plan.world_size)
        yield controller
    finally:
        for task in [*controller._tasks]:
            task.cancel()
        await controller._loop.close()
        assert controller._writer is not None
        await controller._writer.close()


async def until(done: Callable[[], bool]) -> None:
    """Wait for `done`."""
    async with asyncio.timeout(LIMIT_S):
        while not done():
            await asyncio.sleep(0.005)


async def lose(ranks: int, losses: int, *, deep: bool, in_commit: bool) -> list[Loss]:
    """Lose one rank after the other."""
    newest_s = 0.0

    def followed() -> None:
        nonlocal newest_s
        newest_s = time.perf_counter()

    found: list[Loss] = []
    hosts = AnsweringHosts(followed)
    with tempfile.TemporaryDirectory() as folder:
        async with training(Path(folder), plan_of(ranks, deep=deep), hosts) as controller:
            for number in range(losses):
                state = controller._loop.state
                assert isinstance(state, Training)
                members, plan = state.job.membership.members, state.job.progress.plan
                ahead_s = await planned_ahead(controller)
                victim = members[(7 * number + 3) % len(members)]
                undecided = {*members[::2]} - {victim} if in_commit else set[int]()
                hosts.commit(plan, undecided)
                gc.collect()
                begun_s = time.perf_counter()
                hosts.kill(victim)
                await until(lambda now=state: formed_after(controller, hosts, now))
                took_s = newest_s - begun_s
                # Whoever gets no place any more is told less.
                stayed = controller._loop.state
                assert isinstance(stayed, Training)
                placed = {*stayed.job.membership.members}
                known = placed - undecided
                # Whoever is asked for the records sends them for all.
                sent, received = zip(*hosts.bytes_of(known - {min(known)}), strict=True)
                lacked = [each for each, _ in hosts.bytes_of(undecided & placed)]
                found.append(
                    Loss(
                        took_s=took_s,
                        ahead_s=ahead_s,
                        plan_s=plan_s(controller, {*members} - {victim}),
                        sent_bytes=mean(sent),
                        records_bytes=mean(lacked) - mean(sent) if lacked else 0.0,
                        received_bytes=mean(received),
                    )
                )
    return found


def formed_after(controller: Controller, hosts: AnsweringHosts, before: Training) -> bool:
    """Whether the generation after that of `before` trains."""
    now = controller._loop.state
    return (
        isinstance(now, Training)
        and now.job.progress.generation > before.job.progress.generation
        and hosts.trains == now.job.progress.plan.world_size
    )


async def planned_ahead(controller: Controller) -> float:
    """Wait until the plans for the next failure are made; return how long that took, from here on."""
    runtime = controller._runtime
    begun_s = time.perf_counter()
    await runtime._precomputed.look_ahead(runtime.training.domains())
    return time.perf_counter() - begun_s


def plan_s(controller: Controller, ranks: set[int]) -> float:
    """How long a plan for `ranks` takes that was not made ahead."""
    fresh = job_of(Path(), controller._order.plan)[1].replanner
    domains = [f"node{rank // 8}" for rank in sorted(ranks)]
    begun_s = time.perf_counter()
    fresh.plan_for(len(domains), epoch=1, version=1, reason="", domains=domains)
    return time.perf_counter() - begun_s


def show(ranks: int, in_step: Sequence[Loss], in_commit: Sequence[Loss], least: Sequence[Loss]) -> None:
    """Print the figures of jobs with so many ranks, beside the bytes of those with the fewest."""
    took_s = median(loss.took_s for loss in (*in_step, *in_commit))
    said = f"{took_s:.3f} s from word to assignments"
    sent, received = (
        [median(getattr(loss, name) for loss in losses) for losses in (in_step, least)]
        for name in ("sent_bytes", "received_bytes")
    )
    growth = max(sent[0] / sent[1], received[0] / received[1])
    grown = at_most(f"{growth:.2f} times those of the fewest ranks", growth, MOST_GROWTH)
    print(f"{ranks:5} ranks: {at_most(said, took_s, MOST_S) if ranks == 1000 else said}")
    print(f"      {sent[0]:,.0f} bytes sent to a rank, {received[0]:,.0f} received from it; {grown}")
    print(
        f"      in the commit: {median(loss.records_bytes for loss in in_commit):,.0f} more to a rank that lacks its"
        f" records; plans ahead took {median(loss.ahead_s for loss in in_step):.2f} s, one that was not made ahead"
        f" would have taken {median(loss.plan_s for loss in in_step):.3f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args()
    shape = "one pipeline" if options.deep else f"pipelines of {PIPELINE_RANKS} ranks"
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}; {shape}", flush=True)
    least: list[Loss] = []
    for ranks in options.ranks:
        in_step, in_commit = (
            asyncio.run(lose(ranks, options.losses, deep=options.deep, in_commit=late))
            for late in (False, True)
        )
        least = least or in_step
        show(ranks, in_step, in_commit, least)


if __name__ == "__main__":
    main()
