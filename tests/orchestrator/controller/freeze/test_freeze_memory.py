"""A freeze method that a running job was changed to keeps numbers of weights: every later plan has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_controller import controller_of, training
from lifecycle_jobs import step_report

from orchestrator.commands.table import parsed
from orchestrator.controller.actor import Controller
from orchestrator.controller.requests.freeze_request import plan_of
from orchestrator.events.types import Commanded, Event, FreezeChanged, Record, Submitted
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.takeover import taken_over
from planner.freezing import FreezeOverrides
from planner.plan import Plan
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted

MEMORY_BYTES = 170_000_000
"""Of each rank: room for nine layers, and for eight with what APF keeps of them."""
MOST = (9, 1)


def change(plan: Plan, method: str, version: int = 1) -> FreezeChanged:
    control = FreezeOverrides(method=method, r_max=0.8)
    freeze = plan_of(control, plan, epoch=1, version=version)
    return FreezeChanged(from_step=2, method=method, r_max=0.8, by="", plan=freeze, id="f")


def started(change: FreezeChanged, at: int) -> FreezeStarted:
    return FreezeStarted(plan=replace(change.plan, start=at))


async def problem(controller: Controller, partition: Sequence[int]) -> str | None:
    """Why the ranks cannot have `partition`; None: they can."""
    return (await controller.propose([*partition])).problem


def test_moves_have_room_for_the_copies_from_the_request_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steer() -> None:
        async with controller_of(tmp_path, monkeypatch, memory_bytes=MEMORY_BYTES, model={"layers": 8}) as (
            job,
            controller,
        ):
            plan = job.order.plan
            assert await problem(controller, MOST) is None
            on = change(plan, "apf")
            controller._record(on)
            assert "place 0 would need" in str(await problem(controller, MOST))
            controller._record(step_report(1))
            controller._record(started(on, 2))
            assert "place 0 would need" in str(await problem(controller, MOST))
            asked = Commanded(id="p", name="plan", arguments={"partition": [*MOST], "base": None})
            with pytest.raises(JobError, match="place 0 would need"):
                await controller._reshaping.carry_out(parsed(asked))
            off = change(plan, "none", 2)
            controller._record(off)
            assert "place 0 would need" in str(await problem(controller, MOST))
            controller._record(started(off, 3))
            assert await problem(controller, MOST) is None

    asyncio.run(steer())


@pytest.mark.parametrize("takeover", [True, False], ids=["takeover", "resume"])
@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "requested"])
def test_a_controller_that_goes_on_with_a_job_knows_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takeover: bool, adopted: bool
) -> None:
    async def go_on() -> None:
        async with controller_of(tmp_path, monkeypatch, memory_bytes=MEMORY_BYTES, model={"layers": 8}) as (
            job,
            controller,
        ):
            assert await problem(controller, MOST) is None
            on = change(job.order.plan, "apf")
            log: list[Event] = [
                Submitted(job="ending", epoch=1, spec=controller._spec, resume=False),
                step_report(1),
                on,
                *([started(on, 2)] if adopted else []),
            ]
            view = fold(Record(time_s=0.0, event=event) for event in log)
            controller._view = JobView.from_json(view.to_json())
            controller._take_on(taken_over(job.order, view) if takeover else job.order)
            controller._record(
                Submitted(
                    job="ending", epoch=2, spec=controller._spec, resume=not takeover, takeover=takeover
                )
            )
            controller._loop.state = training(job)
            assert "place 0 would need" in str(await problem(controller, MOST))

    asyncio.run(go_on())
