"""A controller with no Ray around it, and no ranks: what it does with commands and with what is logged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from made_profile import made_profile
from planner_beside import PlannerBeside
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.cluster.actor_arguments import in_pieces
from orchestrator.controller import actor
from orchestrator.controller.actor import Controller
from orchestrator.controller.log_writer import LogWriter
from orchestrator.events.types import Submitted
from orchestrator.history.folder import JobFolder
from orchestrator.lifecycle.states import JobData, Membership, Progress, Training
from orchestrator.lifecycle.stimuli import Noted

PARAMETERS = 10**6
"""Of each layer of a job with a profile."""


@asynccontextmanager
async def controller_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, memory_bytes: int | None = None, **sections: Any
) -> AsyncIterator[tuple[ElasticJob, Controller]]:
    """The controller of a job of two ranks that trains.

    Args:
        memory_bytes: of each rank; None: the job has no profile.
        sections: of its spec, besides those of a small job.
    """
    made = resolved(tiny(folder, "ending", pipeline={"ranks": 2}, **sections))
    job = ElasticJob(made)
    if memory_bytes is not None:
        parameters = (PARAMETERS,) * len(made.outline.layers)
        profile = made_profile(made.outline.layers, parameters, 2, memory_bytes=memory_bytes)
        planned = profile.frozen_by(made.spec.freeze.method)
        replanner = replace(job.setup.replanner, profile=planned, parameters=parameters)
        job.setup = replace(job.setup, replanner=replanner, profile=profile)
    context = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor, "PlannerProcess", PlannerBeside)
    spec = made.spec.model_dump(mode="json")
    controller = Controller(*in_pieces(job.order, job.setup, spec))
    log = JobFolder(job.setup.config.job.folder).open_log(1)
    controller._writer = LogWriter(log, folder / "view.json")
    controller._record(Submitted(job=job.order.job, epoch=1, spec=spec, resume=False))
    controller._loop.state = training(job)
    controller._begun.set()
    try:
        yield job, controller
    finally:
        await controller._writer.close()


def training(job: ElasticJob) -> Training:
    """`job` while it trains."""
    members = (0, 1)
    has = JobData(
        progress=Progress(plan=job.order.plan, schedule=job.order.schedule),
        membership=Membership(members=members, alive=frozenset(members)),
    )
    return Training(has, frozenset(members))


def told(controller: Controller) -> list[object]:
    """The events that were posted to the event loop, in order; they are taken out."""
    queue, events = controller._loop._stimuli, []
    while not queue.empty():
        stimulus = queue.get_nowait()
        if isinstance(stimulus, Noted):
            events.append(stimulus.event)
    return events
