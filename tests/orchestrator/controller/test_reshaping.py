"""What the commands that reshape a job ask of it, with ranks that are real processes."""

from __future__ import annotations

from pathlib import Path

from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.lifecycle.stimuli import Aborted
from workers.protocol import StepReport


def test_a_drain_includes_the_rank_that_is_starting_on_the_node(tmp_path: Path) -> None:
    """Ranks 0 and 1 train on two nodes, and the spare rank 2 is starting beside rank 1."""
    told: list[str] = []

    async def drain() -> None:
        command = events.Commanded(id="d", name="drain", arguments={"node": "node1", "deadline_s": 30.0})
        told.append(await reshaping.carry_out(command))
        job.post(Aborted())

    def act(job: ElasticJob, event: events.Event) -> None:
        if event == events.Placing(ranks=(2,)):
            job.loop.spawn(drain())

    spec = tiny(
        tmp_path,
        "drained",
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": 2},
        elastic={"spares": 1},
    )
    job = ElasticJob(resolved(spec), act, node_of=lambda rank: "node0" if rank == 0 else "node1", room=3)
    reshaping = Reshaping(job.order, job.setup, job.loop, job.runtime, job.hosts, nodes=lambda: ())
    ran = job.run()
    (text,) = told
    assert text.startswith("ranks 1, 2 leave node node1 (127.0.0.1)")
    assert [event.ranks for event in ran.of(events.Noticed)] == [(1, 2)]
    assert 2 not in {event.rank for event in ran.of(events.RankStarted)}


def test_other_spares_of_a_job_that_lacks_a_rank_need_room_for_themselves_alone(tmp_path: Path) -> None:
    """One of three ranks dies, the job does not grow, and there is room for one more rank."""
    told: list[str] = []

    command = events.Commanded(id="s", name="scale", arguments={"ranks": None, "spares": 1})

    async def scale() -> None:
        told.append(await reshaping.carry_out(command))

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
