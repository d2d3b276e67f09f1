"""What the commands that reshape a job ask of it, with ranks that are real processes."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lifecycle_jobs import Job as PureJob
from lifecycle_jobs import order_of, train
from pace import patient
from process_hosts import ElasticJob
from ray_jobs import resolved
from spares_that_start import never_up
from tiny_jobs import tiny

from orchestrator.cluster.placement import Node
from orchestrator.commands.table import parsed
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.recap import recap
from orchestrator.lifecycle.effects import Weigh
from orchestrator.lifecycle.states import JobData, Membership, Progress, TargetSize, Training
from orchestrator.lifecycle.stimuli import Aborted, RanksOverdue, Reclaimed, ScaleRequested, Start, Stimulus
from orchestrator.lifecycle.takeover import taken_over
from planner.ir import Schedule
from planner.plan import Plan
from planner.search.replan import Replanner
from workers.config import ElasticConfig
from workers.protocol.reports import StepReport


def drain_of(node: str, id: str = "d") -> events.Commanded:
    return events.Commanded(id=id, name="drain", arguments={"node": node, "deadline_s": 30.0})


def test_a_drain_includes_the_ranks_that_are_starting_on_the_node(tmp_path: Path) -> None:
    """Ranks 0 and 1 train on two nodes, the spare rank 2 is starting beside rank 1, and 3 alone on a third node."""
    told: list[str] = []

    async def drain() -> None:
        told.append(await reshaping.carry_out(parsed(drain_of("node2"))))
        told.append(await reshaping.carry_out(parsed(drain_of("node1"))))
        job.post(Aborted())

    def act(job: ElasticJob, event: events.Event) -> None:
        if event == events.Placing(ranks=(2, 3)):
            job.loop.spawn(drain())

    spec = tiny(
        tmp_path,
        "drained",
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": 2},
        elastic={"spares": 2},
    )
    nodes = [Node(id=f"node{number}", host=f"h{number}", total={}, available={}) for number in range(4)]
    where = {0: "node0", 1: "node1", 2: "node1", 3: "node2"}
    job = ElasticJob(resolved(spec), act, node_of=where.__getitem__, room=4, rig=never_up)
    reshaping = Reshaping(job.order, job.setup, job.loop, job.runtime, job.hosts, nodes=lambda: nodes)
    ran = job.run()
    assert [text.partition(" at ")[0] for text in told] == [
        "rank 3 leaves node node2 (h2)",
        "ranks 1, 2 leave node node1 (127.0.0.1)",
    ]
    assert [event.ranks for event in ran.of(events.Noticed)] == [(3,), (1, 2)]
    assert {event.rank for event in ran.of(events.RankStarted)} == {0, 1}


def reshaping_of(job: ElasticJob) -> Reshaping:
    return Reshaping(job.order, job.setup, job.loop, job.runtime, job.hosts, nodes=lambda: ())


def test_a_controller_that_takes_over_repeats_only_what_its_predecessor_had_checked(tmp_path: Path) -> None:
    job = ElasticJob(resolved(tiny(tmp_path, "taken")))
    known = [
        events.Noticed(node="node1", host="h", source="request", ranks=(1,), left_s=9.0, id="earlier"),
        events.Scaled(ranks=2, spares=1, places=2, id="earlier"),
    ]
    again = reshaping_of(job).again
    assert again(drain_of("node1", "earlier"), known)
    # The same node and the same size, but the previous controller was killed before it had checked them.
    assert not again(drain_of("node1"), known)
    arguments = {"ranks": 2, "spares": None}
    assert not again(events.Commanded(id="s", name="scale", arguments=arguments), known)
    assert again(events.Commanded(id="earlier", name="scale", arguments=arguments), known)


def test_a_scale_keeps_its_time_limit_after_other_spares_and_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five ranks are requested, then one spare, which is answered at once; then the controller is killed."""
    quiet = order_of(3, elastic=ElasticConfig(wait_s=60, grow=False))
    ranks, spares = (
        events.Commanded(id=id, name="scale", arguments=arguments)
        for id, arguments in (
            ("a", {"ranks": 5, "spares": None}),
            ("b", {"ranks": None, "spares": 1}),
        )
    )
    before = train(PureJob(quiet)).take(
        ScaleRequested(events.Scaled(ranks=5, spares=0, places=5, id="a")),
        ScaleRequested(events.Scaled(ranks=5, spares=1, places=5, id="b"), resizes=False),
    )
    log = [events.Submitted(job="j", epoch=1, spec={}, resume=False), ranks, spares, *before.logged]
    view = JobView.from_json(fold(events.Record(time_s=0.0, event=event) for event in log).to_json())
    assert [entry.command.id for entry in view.commands.pending()] == ["a"]

    posted: list[Stimulus] = []
    job = ElasticJob(resolved(tiny(tmp_path, "taken")))
    monkeypatch.setattr(job.loop, "post", posted.append)
    assert reshaping_of(job).again(ranks, recap(view))
    after = PureJob(taken_over(quiet, view)).take(Start())
    after.take(*(Reclaimed(rank, f"node{rank}", "h", after.has.progress.round) for rank in range(3)))
    after.take(*posted, RanksOverdue("a"))
    (answer,) = (event for event in after.logged if isinstance(event, events.Answered))
    assert (answer.id, answer.done) == ("a", False)
    assert answer.text.startswith("3 of 5 ranks were up after 60 s")
    assert after.has.membership.size == TargetSize(places=3, spares=1)


def test_a_plan_that_nobody_waits_for_any_more_is_not_asked_for(tmp_path: Path) -> None:
    job = ElasticJob(resolved(tiny(tmp_path, "ended")))
    weigh = Weigh(job.order.plan, (0,), ("a",), step=1, round=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work = job.runtime.carry_out(weigh)
        assert work is not None
        work.close()  # as when the job ends before the work's first turn
        del work
    assert [str(each.message) for each in caught] == []


class Slow(Replanner):
    """Takes as long as the simulation of a large plan."""

    def checked(self, plan: Plan, domains: Sequence[str]) -> tuple[Plan, Schedule]:
        time.sleep(0.3)
        return super().checked(plan, domains)


def test_a_move_is_simulated_off_the_event_loop(tmp_path: Path) -> None:
    job = ElasticJob(resolved(tiny(tmp_path, "slow", pipeline={"ranks": 2})))
    plan, old = job.order.plan, job.setup.replanner
    slow = Slow(
        first=old.first, schedule=old.schedule, parameters=old.parameters, copies=0, profile=old.profile
    )
    job.runtime = Runtime(replace(job.setup, replanner=slow), job.hosts, job.loop.post, job.loop.spawn)
    members = (0, 1)
    has = JobData(
        progress=Progress(plan=plan, schedule=job.order.schedule),
        membership=Membership(members=members, alive=frozenset(members)),
    )
    last = plan.layers[0][1] - 1
    command = events.Commanded(id="m", name="move", arguments={"layers": str(last), "rank": 1})

    async def ask() -> float:
        job.loop.state = Training(has, frozenset(members))
        moving = asyncio.create_task(reshaping_of(job).carry_out(parsed(command)))
        gaps, before_s = [0.0], time.perf_counter()
        for _ in range(40):
            await asyncio.sleep(0.01)
            now_s = time.perf_counter()
            gaps.append(now_s - before_s)
            before_s = now_s
        moving.cancel()
        return max(gaps)

    assert asyncio.run(ask()) < patient(0.25)


def test_other_spares_of_a_job_that_lacks_a_rank_need_room_for_themselves_alone(tmp_path: Path) -> None:
    """One of three ranks dies, the job does not grow, and there is room for one more rank."""
    told: list[str] = []

    command = events.Commanded(id="s", name="scale", arguments={"ranks": None, "spares": 1})

    async def scale() -> None:
        told.append(await reshaping.carry_out(parsed(command)))

    def act(job: ElasticJob, event: events.Event) -> None:
        match event:
            case StepReport(step=2):
                job.signal(1)
            case events.Regrouped():
                job.loop.spawn(scale())
            case events.RankStarted(rank=3):
                # As a controller that takes over does.
                assert reshaping.again(command, job.log)
                job.post(Aborted())
            case _:
                pass

    spec = tiny(
        tmp_path,
        "short",
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": 3},
        elastic={"grow": False},
    )
    job = ElasticJob(resolved(spec), act, room=3)
    reshaping = Reshaping(job.order, job.setup, job.loop, job.runtime, job.hosts, nodes=lambda: ())
    ran = job.run()
    assert told == ["keeps 1 spare rank from now on"]
    assert [(event.done, event.text) for event in ran.of(events.Answered)] == [(True, told[0])] * 2
    assert [event.cause for event in ran.of(events.Regrouped)] == ["loss"]
