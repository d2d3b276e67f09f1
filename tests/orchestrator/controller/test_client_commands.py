"""Commands to a controller whose job ends or changes under them: each has one outcome, and the client gets that one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from threading import Event as Signal
from typing import Any

import pytest
from bare_controller import controller_of
from lifecycle_jobs import step_report

from orchestrator.cluster.placement import Node
from orchestrator.controller import reshaping
from orchestrator.controller.freeze import freeze_control
from orchestrator.controller.requests.freeze_request import Adopt, Running
from orchestrator.events.log import read_log
from orchestrator.events.types import (
    Answered,
    Commanded,
    Dismissed,
    Finished,
    Noticed,
    RankStarted,
    Submitted,
)
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import PlanChanged
from orchestrator.history.recap import recap
from orchestrator.lifecycle import states
from orchestrator.lifecycle.moves import newest_version
from orchestrator.lifecycle.states import Training
from planner.freezing import FreezeOverrides, Phases
from workers.protocol.errors import JobError


def test_a_request_that_is_solved_when_the_job_ends_has_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Signal()

    def slow(wanted: object, job: object) -> Adopt:
        assert over.wait(10), "the event loop waits for the solution"
        return Adopt(control=FreezeOverrides(method="none", r_max=0.5))

    monkeypatch.setattr(freeze_control, "decided", slow)

    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (job, controller):
            asking = asyncio.create_task(controller.command("f", "freeze", {"method": "none", "r_max": None}))
            await asyncio.sleep(0.05)
            end = Finished(step=2, stopped=False, state_sha256=None)
            controller._loop.state = states.JobFinished(2, stopped=False, state_sha256=None)
            controller._record(end)
            over.set()
            with pytest.raises(JobError, match="the job ended first: trained to its last step, 2"):
                await asking
            await controller._written()
            told = [record.event for record in read_log(JobFolder(job.setup.config.job.folder).events_path)]
            assert [type(event) for event in told] == [Submitted, Commanded, Answered, Finished]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "phases", "given_up"),
    [("none", None, True), ("timelyfreeze", Phases(warm_up=0, monitoring=4, ramp=6), False)],
)
def test_a_change_gives_the_planner_up_if_it_leaves_nothing_to_solve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, phases: Phases | None, given_up: bool
) -> None:
    control = FreezeOverrides(method=method, r_max=0.5, phases=phases)
    monkeypatch.setattr(freeze_control, "decided", lambda wanted, job: Adopt(control=control))
    dropped: list[str] = []
    posted: list[object] = []

    async def post_and_wait(stimulus: object) -> None:
        posted.append(stimulus)

    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            monkeypatch.setattr(controller._freezing._planner, "drop", dropped.append)
            monkeypatch.setattr(controller._loop, "post_and_wait", post_and_wait)
            await controller.command("f", "freeze", {"method": method, "r_max": None})

    asyncio.run(ask())
    assert len(posted) == 1
    assert dropped == (["freezing"] if given_up else [])


def test_a_request_is_decided_on_the_job_as_it_was_when_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided in a thread, while the job goes on."""
    seen: list[tuple[int, list[int]]] = []
    taken = Signal()

    def slow(wanted: object, job: Running) -> Adopt:
        assert taken.wait(10), "the event loop waits for the decision"
        seen.append((job.view.step, [*job.view.steps]))
        raise JobError("no")

    monkeypatch.setattr(freeze_control, "decided", slow)

    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            controller._record(step_report(1))
            asking = asyncio.create_task(controller.command("f", "freeze", {"method": "apf", "r_max": None}))
            await asyncio.sleep(0.05)
            controller._record(step_report(2))
            taken.set()
            with pytest.raises(JobError, match="no"):
                await asking

    asyncio.run(ask())
    assert seen == [(1, [1])]


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


def test_a_drained_node_is_undrained_once_its_ranks_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (job, controller):

            async def refused(node: str, why: str) -> None:
                with pytest.raises(JobError, match=why):
                    await controller.command(f"to {node}, {why}", "undrain", {"node": node})

            controller._record(RankStarted(rank=0, node="a1", host="10.0.0.1", pid=1))
            controller._record(RankStarted(rank=1, node="a2", host="10.0.0.2", pid=1))
            await refused("a1", r"node 'a1' is not drained: there is nothing to undo\. Drained nodes: none")
            for rank, source in ((0, "request"), (1, "request"), (1, "azure")):
                controller._record(
                    Noticed(
                        node=f"a{rank + 1}",
                        host=f"10.0.0.{rank + 1}",
                        source=source,
                        ranks=(rank,),
                        left_s=1.0,
                    )
                )
            await refused("a", r"means more than one node.*Drained nodes: a1 \(10\.0\.0\.1\), a2")
            await refused("a1", "rank 0 is still leaving node a1: undrain it once they have left")
            controller._record(Dismissed(ranks=(0, 1)))
            await refused("a2", "node a2 is to go by a notice of azure too")
            # A controller that takes over keeps off both nodes.
            for event in recap(JobView.from_json(await controller.view())):
                job.runtime.fold(event)
            assert {*job.hosts.shunned} == {"a1", "a2"}
            said = await controller.command("u", "undrain", {"node": "10.0.0.1"})
            assert said == "the job may start ranks on node a1 (10.0.0.1) again"
            answer = await controller.outcome("u", 0.0)
            assert answer is not None
            assert (answer.done, answer.text) == (True, said)
            await refused("a1", "is not drained")
            job.hosts.shunned.clear()
            for event in recap(JobView.from_json(await controller.view())):
                job.runtime.fold(event)
            assert {*job.hosts.shunned} == {"a2"}

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


RESHAPING: dict[str, dict[str, Any]] = {
    "move": {"layers": "0", "rank": 1},
    "scale": {"ranks": 1, "spares": None},
    "drain": {"node": "n", "deadline_s": 1.0},
    "freeze": {"method": "apf", "r_max": None},
}


@pytest.mark.parametrize("name", RESHAPING)
def test_a_command_for_an_older_plan_is_refused_with_the_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            state = controller._loop.state
            assert isinstance(state, Training)
            epoch, version = newest_version(state.job)
            older = {**RESHAPING[name], "base": [epoch, version - 1]}
            for _ in range(2):
                with pytest.raises(PlanChanged) as refused:
                    await controller.command("c", name, older)
                assert (refused.value.epoch, refused.value.version) == (epoch, version)
            with pytest.raises(JobError, match="is no version of a plan"):
                await controller.command("other", name, {**RESHAPING[name], "base": "newest"})

    asyncio.run(ask())


@pytest.mark.parametrize("name", ["scale", "drain", "freeze"])
def test_a_plan_that_is_issued_while_a_command_is_checked_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each is checked in a thread, while the job goes on."""

    async def ask() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            state = controller._loop.state
            assert isinstance(state, Training)
            base = newest_version(state.job)

            def checked(*arguments: object) -> Adopt:
                newer = replace(state.job.progress, plan=replace(state.job.progress.plan, version=7))
                controller._loop.state = replace(state, job=replace(state.job, progress=newer))
                return Adopt(control=FreezeOverrides(method="apf", r_max=0.5))

            async def room(without: object = ()) -> int:
                return 9

            monkeypatch.setattr(freeze_control, "decided", checked)
            monkeypatch.setattr(reshaping, "check_plan", checked)
            monkeypatch.setattr(reshaping, "check_refuge", checked)
            monkeypatch.setattr(controller._hosts, "room", room)
            monkeypatch.setattr(
                controller._reshaping, "nodes", lambda: [Node(id="n", host="h", total={}, available={})]
            )
            monkeypatch.setattr(reshaping, "choose_node", lambda name, ours, nodes: name)
            with pytest.raises(PlanChanged) as refused:
                await controller.command("c", name, {**RESHAPING[name], "base": list(base)})
            assert (refused.value.epoch, refused.value.version) == (base[0], 7)

    asyncio.run(ask())
