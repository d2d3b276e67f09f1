"""Commands to a controller whose job has ended, while it still passes on what is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.controller.actor import Controller
from orchestrator.events.folder import JobFolder
from orchestrator.events.types import Commanded, Event, Failed, Finished, Record, Submitted
from workers.protocol import JobError

ENDS = (
    Finished(step=2, stopped=False, state_sha256=None),
    Failed(reason="no room", user_error=False),
)


@pytest.mark.parametrize("end", ENDS, ids=["finished", "failed"])
def test_once_the_log_has_the_end_no_command_follows_it(
    end: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolved(tiny(tmp_path, "ended"))
    job = ElasticJob(made)
    spec = made.spec.model_dump(mode="json")
    log = JobFolder(job.setup.config.output).open_log(1)
    asked = Commanded(id="early", name="stop", arguments={})
    for event in (Submitted(job=job.order.job, epoch=1, spec=spec, resume=False), asked, end):
        log.append(Record(time_s=0.0, event=event))
    log.close()
    # A controller is an actor; this one has no Ray around it, and its sinks have not closed yet.
    context = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    async def ask() -> None:
        controller = Controller(job.order, job.setup, spec)
        await controller._load()
        controller._begun.set()
        for name in ("stop", "abort", "checkpoint"):
            with pytest.raises(JobError, match="has ended: it takes no commands"):
                await controller.command(name, name, {})
        assert [*controller._view.commands.entries] == ["early"]
        answer = await controller.outcome("early", 0.0)
        assert answer is not None

    asyncio.run(ask())
