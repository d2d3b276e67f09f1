"""A slow pipeline beside a fast one: a step with even shares of the batch, and with the shares that the planner finds.

    python -m benchmarks.shares [--factor F ...] [--pass-ms M] [--microbatches M]

Two pipelines of two emulated ranks, one replica each. Both ranks of the second pipeline become slow for good. The
shares follow at once, in force from a commit on; no layer moves, and the bits stay. The predictions are by a profile
made by hand, which leaves out what the emulated layers really compute.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from benchmarks.parts.process_jobs import ElasticJob, Ran, made_profile
from benchmarks.parts.settled_job import settled
from orchestrator.controller.requests.move_request import domains_of, move_to
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished, Training
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import predict
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, ModelConfig
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.reports import StepReport, SwitchReport

RANKS, LAYERS = 4, 8
SLOW = (2, 3)
"""The ranks of the second pipeline."""
WARM_UP, COUNTED = 4, 8
SETTLED = 4
"""Steps after the ranks have become slow that are not counted."""


def job(folder: Path, given: argparse.Namespace) -> Settled:
    pass_s = given.pass_ms / 1e3
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    spec = Spec(
        job=JobConfig(
            name="job", output=str(folder / "job"), steps=WARM_UP + SETTLED + COUNTED, sample_tokens=0
        ),
        model=ModelConfig(family="gpt", layers=LAYERS - 2, width=16, heads=2, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(
            ranks=RANKS,
            replicas=2,
            microbatches=given.microbatches,
            microbatch_size=1,
            partition=(LAYERS // 2,) * 2,
        ),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=pass_s, input_grad_s=pass_s, weight_grad_s=pass_s),
        ),
        elastic=ElasticConfig(grow=False, allow_faults=True),
    )
    return settled(spec)


def profile_of(made: Settled, given: argparse.Namespace) -> Profile:
    outline = made.outline
    return made_profile(outline.layers, outline.parameters, RANKS, weights=[given.pass_ms / 10] * LAYERS)


def slowdowns(factor: float) -> tuple[float, ...]:
    return tuple(factor if rank in SLOW else 1.0 for rank in range(RANKS))


def run(folder: Path, factor: float, given: argparse.Namespace, *, shares: bool) -> Ran:
    made = job(folder, given)

    def act(running: ElasticJob, event: events.Event) -> None:
        if not isinstance(event, StepReport) or event.step != WARM_UP:
            return
        for rank in SLOW:
            running.call(rank, "arm", Fault(kind=FaultKind.SLOW, factor=factor))
        state, replanner = running.loop.state, running.setup.replanner
        assert isinstance(state, Training)
        if shares:
            found = replanner.with_shares(state.job.progress.plan, domains_of(state.job), slowdowns(factor))
            move = move_to(state.job, replanner, found, mode="live", asked_s=time.time())
            running.post(Migrate(move))

    ran = ElasticJob(made, act, profile=profile_of(made, given)).run(limit_s=300.0)
    assert isinstance(ran.state, JobFinished), ran.state
    return ran


def settled_s(ran: Ran) -> float:
    """The median of the last steps."""
    return median(report.step_s for report in ran.of(StepReport)[-COUNTED:])


def measured(factor: float, given: argparse.Namespace) -> str:
    """The row of one factor."""
    with tempfile.TemporaryDirectory() as folder:
        even = run(Path(folder), factor, given, shares=False)
    with tempfile.TemporaryDirectory() as folder:
        uneven = run(Path(folder), factor, given, shares=True)
    assert uneven.state_sha256 == even.state_sha256, "the bits are not those of even shares"
    (moved,) = uneven.of(events.Migrated)
    with tempfile.TemporaryDirectory() as folder:
        made = job(Path(folder), given)
        known = profile_of(made, given)
    devices = tuple(
        replace(device, slowdown=slow)
        for device, slow in zip(known.cluster.devices, slowdowns(factor), strict=True)
    )
    known = replace(known, cluster=replace(known.cluster, devices=devices))
    foreseen_s = [
        predict(known, replace(made.plan, shares=shares), schedule_of(made.plan)).step_s
        for shares in ((), moved.shares)
    ]
    before_s, after_s = settled_s(even), settled_s(uneven)
    limit = 2 / (1 + 1 / factor) / factor
    stall_s = max(report.stall_s for report in uneven.of(SwitchReport))
    return (
        f"factor {factor:g}: even {before_s * 1e3:.0f} ms (predicted {foreseen_s[0] * 1e3:.0f}), shares"
        f" {' + '.join(map(str, moved.shares))} {after_s * 1e3:.0f} ms (predicted {foreseen_s[1] * 1e3:.0f}):"
        f" {1 - after_s / before_s:.1%} below (limit of perfect balance {1 - limit:.1%}); in force"
        f" {moved.step - WARM_UP} steps after, stall {stall_s * 1e3:.0f} ms; equal bits"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, action="append")
    parser.add_argument("--pass-ms", type=float, default=4.0, help="of a layer and microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a replica")
    given = parser.parse_args(arguments)
    print(
        f"2 pipelines of 2 emulated ranks, {LAYERS} equal layers, {given.microbatches} microbatches per replica, passes"
        f" of {given.pass_ms:g} ms; {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
        f" torch {torch.__version__}; {date.today()}"
    )
    for factor in given.factor or (1.8, 3.2):
        print(measured(factor, given), flush=True)


if __name__ == "__main__":
    main()
