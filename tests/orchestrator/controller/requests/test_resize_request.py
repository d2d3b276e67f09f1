"""Requests for another number of ranks or for leaving a node: what is refused, and with which way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_profile import made_profile
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.cluster.placement import Node
from orchestrator.controller.requests.resize_request import (
    Capacity,
    check_plan,
    check_refuge,
    choose_node,
    nodes_of,
    scaled,
)
from orchestrator.events.types import Scaled
from orchestrator.lifecycle.states import JobData, Membership, Progress, TargetSize
from orchestrator.prepare.planning import replanner_of
from planner.search.replan import Replanner
from workers.actor import Home
from workers.config import ElasticConfig
from workers.protocol.errors import JobError

HAS = Capacity(
    elastic=ElasticConfig(),
    replicas=1,
    pipelines=1,
    size=TargetSize(places=3, spares=0),
    members=3,
    up=3,
    room=2,
)


@pytest.mark.parametrize(
    ("ranks", "spares", "has", "size"),
    [
        (2, None, HAS, Scaled(ranks=2, spares=0, places=2)),
        (5, None, HAS, Scaled(ranks=5, spares=0, places=5)),
        (None, 2, HAS, Scaled(ranks=3, spares=2, places=3)),
        (4, 1, replace(HAS, size=TargetSize(places=3, spares=1)), Scaled(ranks=4, spares=1, places=4)),
        (
            2,
            None,
            replace(HAS, replicas=2, pipelines=2, size=TargetSize(places=2, spares=0)),
            Scaled(ranks=2, spares=0, places=4),
        ),
        # A job that lacks ranks may still be told to have fewer than it was to have.
        (
            4,
            None,
            replace(HAS, size=TargetSize(places=5, spares=0), room=0),
            Scaled(ranks=4, spares=0, places=4),
        ),
        # Its spares need room, the ranks that it lacks do not.
        (None, 1, replace(HAS, members=2, up=2, room=1), Scaled(ranks=3, spares=1, places=3)),
    ],
)
def test_a_size_that_can_be(ranks: int | None, spares: int | None, has: Capacity, size: Scaled) -> None:
    assert scaled(ranks, spares, has, layers=9) == size


@pytest.mark.parametrize(
    ("ranks", "spares", "has", "why"),
    [
        (None, None, HAS, "scale to what"),
        (0, None, HAS, "at least 1 rank, and 0 are asked for"),
        (-2, None, HAS, "at least 1 rank, and -2 are asked for"),
        (2, -1, HAS, "-1 spare ranks are asked for"),
        (10, None, HAS, "the model has 9 layers: each rank needs at least one, so ask for 9 at most"),
        (6, None, HAS, "6 ranks would be needed, the job has 3, and the cluster has room for 2 more"),
        (None, 3, HAS, "6 ranks would be needed"),
        (None, 2, replace(HAS, members=2, up=2, room=1), "4 ranks would be needed, the job has 2"),
        (1, None, replace(HAS, elastic=ElasticConfig(min_ranks=2)), "fewer than elastic.min_ranks = 2"),
        (2, 1, replace(HAS, elastic=ElasticConfig(redundancy="none")), "spares would be of no use"),
    ],
)
def test_a_size_that_cannot_be(ranks: int | None, spares: int | None, has: Capacity, why: str) -> None:
    with pytest.raises(JobError, match=why):
        scaled(ranks, spares, has, layers=9)


FOUR = replace(HAS, replicas=4, pipelines=1, size=TargetSize(places=4, spares=0), members=4, up=4, room=8)
"""One pipeline of four ranks for four replicas."""
TWO = replace(FOUR, pipelines=2, size=TargetSize(places=4, spares=0, pipelines=2))
"""The same ranks in two pipelines, as somebody asked."""


@pytest.mark.parametrize(
    ("ranks", "pipelines", "has", "size"),
    [
        (None, 2, FOUR, Scaled(ranks=2, spares=0, places=4, pipelines=2)),
        (1, 4, FOUR, Scaled(ranks=1, spares=0, places=4, pipelines=4)),
        (3, None, FOUR, Scaled(ranks=3, spares=0, places=3)),
        (3, None, TWO, Scaled(ranks=3, spares=0, places=6, pipelines=2)),
        (None, 3, TWO, Scaled(ranks=1, spares=0, places=3, pipelines=3)),
        (None, 0, TWO, Scaled(ranks=2, spares=0, places=4)),
    ],
)
def test_a_number_of_pipelines_that_can_be(
    ranks: int | None, pipelines: int | None, has: Capacity, size: Scaled
) -> None:
    assert scaled(ranks, None, has, pipelines=pipelines, layers=9) == size


@pytest.mark.parametrize("pipelines", [5, -1])
def test_more_pipelines_than_replicas_are_refused(pipelines: int) -> None:
    with pytest.raises(JobError, match=rf"{pipelines} pipelines are asked for.*4 replicas: ask for 1 to 4"):
        scaled(None, None, FOUR, pipelines=pipelines, layers=9)


def begun(folder: Path, memory_bytes: int | None = None) -> tuple[JobData, Replanner]:
    """A job of ten layers on four ranks, two on each of two nodes; every layer has a million parameters."""
    done = resolved(tiny(folder, "job", model={"layers": 8}))
    members = (0, 1, 2, 3)
    job = JobData(
        progress=Progress(plan=done.plan, schedule=done.schedule),
        membership=Membership(
            members=members,
            alive=frozenset(members),
            nodes={rank: f"n{rank // 2}" for rank in members},
        ),
    )
    replanner = replanner_of(done)
    if memory_bytes is not None:
        parameters = (1_000_000,) * 10
        profile = made_profile(done.outline.layers, parameters, 4, memory_bytes=memory_bytes)
        replanner = replace(replanner, profile=profile, parameters=parameters)
    return job, replanner


def test_a_plan_must_use_all_ranks_and_fit_their_memory(tmp_path: Path) -> None:
    job, replanner = begun(tmp_path, 10**9)
    check_plan(job, replanner, Scaled(ranks=3, spares=0, places=3))
    check_plan(job, replanner, Scaled(ranks=5, spares=0, places=5))
    with pytest.raises(JobError, match=r"a plan for 6 ranks would use 5 of them .*ask for 5 per pipeline"):
        check_plan(job, replanner, Scaled(ranks=6, spares=0, places=6))
    job, replanner = begun(tmp_path, 60_000_000)
    with pytest.raises(JobError, match=r"no plan for 1 rank: .*bytes"):
        check_plan(job, replanner, Scaled(ranks=1, spares=0, places=1))
    with pytest.raises(JobError, match=r"a plan for 11 ranks would use 10 of them .*ask for 10 per pipeline"):
        check_plan(*begun(tmp_path), Scaled(ranks=11, spares=0, places=11))


HOMES = {
    0: Home(node="abc1", host="10.0.0.1", pid=1),
    1: Home(node="abc1", host="10.0.0.1", pid=2),
    2: Home(node="abd2", host="10.0.0.2", pid=3),
}
CLUSTER = tuple(
    Node(id=id, host=host, total={}, available={})
    for id, host in (("abc1", "10.0.0.1"), ("abd2", "10.0.0.2"), ("f00", "10.0.0.3"))
)


OURS = nodes_of(HOMES, [], CLUSTER)


@pytest.mark.parametrize(("name", "node"), [("abc", "abc1"), ("abd2", "abd2"), ("10.0.0.1", "abc1")])
def test_a_node_is_named_by_its_id_the_beginning_of_it_or_its_host(name: str, node: str) -> None:
    assert choose_node(name, OURS, CLUSTER) == node


def test_a_node_on_which_a_rank_only_starts_is_one_of_the_job() -> None:
    assert nodes_of(HOMES, ["f00"], CLUSTER) == {**OURS, "f00": "10.0.0.3"}
    assert choose_node("f0", nodes_of(HOMES, ["f00"], CLUSTER), CLUSTER) == "f00"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ab", "'ab' means more than one node: give more of its id"),
        ("f00", "the job has no rank on node 'f00': there is nothing to drain"),
        ("10.0.0.3", "the job has no rank on node '10.0.0.3'"),
        ("zzz", r"there is no node 'zzz'; the job's nodes: abc1 \(10.0.0.1\), abd2 \(10.0.0.2\)"),
        ("", "there is no node ''"),
    ],
)
def test_other_names_are_refused_with_the_nodes_of_the_job(name: str, why: str) -> None:
    with pytest.raises(JobError, match=why):
        choose_node(name, OURS, CLUSTER)


def test_a_node_is_left_only_if_there_is_somewhere_to_go(tmp_path: Path) -> None:
    job, replanner = begun(tmp_path)
    has = replace(HAS, size=TargetSize(places=4, spares=0), up=4, room=0)
    check_refuge(frozenset({0, 1}), job, replanner, has, "n0")
    every = frozenset({0, 1, 2, 3})
    with pytest.raises(JobError, match="nowhere to go: without node n0 the job has 0 ranks"):
        check_refuge(every, job, replanner, has, "n0")
    check_refuge(every, job, replanner, replace(has, room=1), "n0")
    stiff = replace(has, elastic=ElasticConfig(min_ranks=3))
    with pytest.raises(JobError, match=r"the job needs 3\. Add a node first"):
        check_refuge(frozenset({0, 1}), job, replanner, stiff, "n0")
    # Ranks start elsewhere only once those of the node have left, and such a job waits for none.
    hasty = replace(has, elastic=ElasticConfig(min_ranks=3, wait_s=0), room=2)
    with pytest.raises(
        JobError, match=r"needs 3\. elastic\.wait_s = 0 waits for no others: scale to more spares"
    ):
        check_refuge(frozenset({0, 1}), job, replanner, hasty, "n0")
    with pytest.raises(JobError, match=r"the job needs 1\. elastic\.wait_s = 0"):
        check_refuge(every, job, replanner, replace(hasty, elastic=ElasticConfig(wait_s=0)), "n0")
    check_refuge(frozenset({3}), job, replanner, hasty, "n1")
    job, replanner = begun(tmp_path, 60_000_000)
    with pytest.raises(JobError, match=r"nowhere to go: no plan for 2 ranks: .*bytes.*Add a node first"):
        check_refuge(frozenset({0, 1}), job, replanner, has, "n0")
