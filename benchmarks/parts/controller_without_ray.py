"""The controller of `long_job`, as it is while the ranks train, without Ray around it and without ranks.

Everything that it does for a report is real: its event loop and lifecycle, its view and snapshots, the records that
it keeps for clients, its metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import ray

from benchmarks.parts.long_job import MONITORING_SPEC, NAME, PLAN, schedule
from orchestrator.cluster.actor_arguments import in_pieces
from orchestrator.controller.actor import KEPT_RECORDS, Controller
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.log_writer import LogWriter, RecordLog
from orchestrator.controller.outlets import Outlets
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView
from orchestrator.history.snapshot import SNAPSHOT
from orchestrator.lifecycle.states import JobData, Membership, Order, Progress, Training
from planner.search.replan import Replanner
from workers.config import ClusterConfig, JobConfig, PipelineConfig, WorkerConfig


@asynccontextmanager
async def controller_of(
    folder: Path, view: JobView, recent: Iterable[Record], log: RecordLog
) -> AsyncIterator[Controller]:
    """The controller of a job with this view, which goes on from there.

    Args:
        folder: where its snapshots go.
        recent: the newest records of the job.
        log: takes the records that follow.
    """
    alone = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    with patch.object(ray, "get_runtime_context", lambda: alone):
        controller = Controller(*in_pieces(_order(), _setup(folder), MONITORING_SPEC))
    controller._view = view
    controller._records.extend(recent)
    assert len(controller._records) == min(KEPT_RECORDS, view.events)
    controller._writer = LogWriter(log, folder / SNAPSHOT)
    controller._outlets = Outlets(view, MONITORING_SPEC, folder, controller._loop.post)
    loop = controller._loop
    loop._stimuli.get_nowait()  # `Start`: this job trains already
    loop.state = _training(view)
    loop.spawn(controller._outlets.keep_recording(view))
    running = asyncio.create_task(loop.run(controller))
    controller._begun.set()
    try:
        yield controller
    finally:
        running.cancel()
        await loop.close()
        await controller._writer.close()


def _order() -> Order:
    return Order(
        job=NAME, epoch=1, generation=1, plan=PLAN, schedule=schedule(), checkpoints=(), timeout_s=60.0
    )


def _setup(folder: Path) -> ControllerConfig:
    config = WorkerConfig(
        job=JobConfig(
            name=NAME,
            steps=MONITORING_SPEC["job"]["steps"],
            timeline_every=0,
            sample_tokens=0,
            output=str(folder),
        ),
        pipeline=PipelineConfig(microbatch_size=1, microbatches=PLAN.microbatches, replicas=PLAN.replicas),
        cluster=ClusterConfig(device="cpu", wait_s=60.0, timeout_s=60.0),
    )
    planned = Replanner(first=PLAN, schedule=schedule(), parameters=(1,) * PLAN.layers[-1][1], copies=0)
    return ControllerConfig(
        config=config,
        marker=None,
        replanner=planned,
        secret=b"",
    )


def _training(view: JobView) -> Training:
    members = view.ranks.members
    progress = Progress(
        plan=PLAN, schedule=schedule(), generation=1, trained=True, version=1, step=view.step, began=0
    )
    return Training(
        JobData(progress=progress, membership=Membership(members=members, alive=frozenset(members))),
        frozenset(members),
    )
