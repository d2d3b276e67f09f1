"""Copies and failure domains: a job that has too few for its copies does not start, and goes on after losses."""

from __future__ import annotations

from dataclasses import replace

from lifecycle_jobs import DEAD, Job, order_of, plan_of, position, ready, recovered, train

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import MakePlan
from orchestrator.lifecycle.states import Closing, JobFailed
from orchestrator.lifecycle.stimuli import Placed, PlanReady, Positioned, Start
from workers.config import ElasticConfig

TWICE = order_of(3, elastic=ElasticConfig(redundancy="peer", copies=2))


def test_a_job_does_not_start_on_fewer_nodes_than_its_copies_need() -> None:
    job = Job(TWICE).take(Start(), Placed(), ready(0), ready(1), replace(ready(2), node="node1"))
    job.take(PlanReady(TWICE.plan, TWICE.schedule))
    assert isinstance(job.state, Closing)
    assert job.state.end == JobFailed(
        "elastic.copies = 2 needs 3 failure domains, and the job has 2 nodes: a layer and its copies are each on"
        " another node: add nodes, spread the ranks over more of them, or lower elastic.copies",
        user_error=True,
    )


def test_after_a_loss_it_goes_on_with_as_many_copies_as_its_nodes_allow_and_says_so() -> None:
    job = train(Job(TWICE))
    assert not [event for event in job.logged if isinstance(event, events.Warned)]
    job.take(DEAD, Positioned(position(0, 1, (0, 1, 2)), 1), Positioned(position(2, 1, (0, 1, 2)), 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert [event.text for event in job.logged if isinstance(event, events.Warned)] == [
        "elastic.copies = 2 needs 3 failure domains, and the job has 2 nodes: a layer and its copies are each on"
        " another node: each layer has as many copies as these allow"
    ]


def test_plans_are_made_for_nodes_with_their_zones() -> None:
    job = Job(TWICE).take(Start(), Placed(), *(replace(ready(rank), zone=f"z{rank // 2}") for rank in (0, 1)))
    job.take(ready(2))
    make = next(effect for effect in job.without_logs if isinstance(effect, MakePlan))
    assert make.domains == {0: "z0/node0", 1: "z0/node1", 2: "node2"}
    started = [event for event in job.logged if isinstance(event, events.RankStarted)]
    assert [event.zone for event in started] == ["z0", "z0", ""]
