"""Commands to a controller whose job ends or changes under them: each has one outcome, and the client gets that one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace

import pytest
import ray
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.controller import freeze_control
from orchestrator.controller.actor import Controller
from orchestrator.controller.freeze_request import Adopt
from orchestrator.controller.log_writer import LogWriter
from orchestrator.events.folder import JobFolder
from orchestrator.events.log import read_log
from orchestrator.events.types import Answered, Commanded, Finished, Submitted
from orchestrator.history.proposal import PlanChanged
from orchestrator.lifecycle import states
from orchestrator.lifecycle.moves import newest_version
from orchestrator.lifecycle.states import Job, Membership, Progress, Training
from planner.freezing import Control
from workers.protocol import JobError


@asynccontextmanager
async def controller_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ElasticJob, Controller]]:
    """The controller of a job of two ranks that trains; it has no Ray around it, and no ranks."""
    made = resolved(tiny(folder, "ending", pipeline={"ranks": 2}))
    job = ElasticJob(made)
    context = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    spec = made.spec.model_dump(mode="json")
    controller = Controller(job.order, job.setup, spec)
    log = JobFolder(job.setup.config.output).open_log(1)
    controller._writer = LogWriter(log, folder / "view.json")
    controller._record(Submitted(job=job.order.job, epoch=1, spec=spec, resume=False))
    members = (0, 1)
    has = Job(
        progress=Progress(plan=job.order.plan, schedule=job.order.schedule),
        membership=Membership(members=members, alive=frozenset(members)),
    )
    controller._loop.state = Training(has, frozenset(members))
    controller._begun.set()
    try:
        yield job, controller
    finally:
        await controller._writer.close()


def test_a_request_that_is_solved_when_the_job_ends_has_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Signal()

    def slow(wanted: object, job: object) -> Adopt:
        assert over.wait(10), "the event loop waits for the solution"
        return Adopt(control=Control(method="none", r_max=0.5))

    monkeypatch.setattr(freeze_control, "decided", slow)

    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (job, controller):
            asking = asyncio.create_task(controller.command("f", "freeze", {"method": "none", "r_max": None}))
            await asyncio.sleep(0.05)
            end = Finished(step=2, stopped=False, state_sha256=None)
            controller._loop.state = states.Finished(2, stopped=False, state_sha256=None)
            controller._record(end)
            over.set()
            with pytest.raises(JobError, match="the job ended first: trained to its last step, 2"):
                await asking
            await controller._written()
            told = [record.event for record in read_log(JobFolder(job.setup.config.output).events_path)]
            assert [type(event) for event in told] == [Submitted, Commanded, Answered, Finished]

    asyncio.run(ask())


def test_a_command_that_fails_as_nobody_expects_has_its_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            # Ray is not there to be asked for its nodes.
            drain = {"node": "n", "deadline_s": 1.0}
            with pytest.raises(JobError, match="the drain failed: "):
                await controller.command("d", "drain", drain)
            answer = await controller.outcome("d", 0.0)
            assert answer is not None
            assert not answer.done

    asyncio.run(ask())


def test_a_plan_that_the_job_has_left_meanwhile_is_refused_with_the_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            state = controller._loop.state
            assert isinstance(state, Training)
            base = newest_version(state.job)

            async def change_meanwhile(command: Commanded) -> str:
                """The lifecycle refuses the move, as the ranks follow another plan when its turn comes."""
                newer = replace(state.job.progress, plan=replace(state.job.progress.plan, version=7))
                controller._loop.state = replace(state, job=replace(state.job, progress=newer))
                controller._record(Answered(id="p", done=False, step=0, text="the job's plan has changed"))
                return "moves"

            monkeypatch.setattr(controller._reshaping, "carry_out", change_meanwhile)
            asked = {"partition": [1, 1], "base": list(base)}
            for _ in range(2):
                with pytest.raises(PlanChanged) as refused:
                    await controller.command("p", "plan", asked)
                assert (refused.value.epoch, refused.value.version) == (base[0], 7)

    asyncio.run(ask())
