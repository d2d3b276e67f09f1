"""One job on a real Ray cluster that is scaled, cut otherwise and drained while it trains, to the same bits.

For `make bench`: in `make test`, `test_ray_commands.py` has another job do the same, and the tests in
`controller/requests` see what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from ray.cluster_utils import Cluster
from ray_jobs import assert_nothing_left, driver_of, job_of
from ray_nodes import add_node, start_head
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import Refused
from orchestrator.client.jobs import Command
from orchestrator.events import types as events
from orchestrator.history.folder import JobFolder
from orchestrator.history.proposal import PlanChanged
from orchestrator.spec.job_spec import Spec
from workers.protocol.reports import StepReport

pytestmark = pytest.mark.soak

Kind = TypeVar("Kind")
JOB = "reshaped"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without ranks, and two nodes with room for two ranks each."""
    nodes = start_head(0)
    try:
        for _ in range(2):
            add_node(nodes, 2)
        with driver_of(nodes):
            yield nodes
            assert_nothing_left()
    finally:
        nodes.shutdown()


def long_job(folder: Path, times_s: float, **pipeline: int) -> Spec:
    """A job of six layers on two ranks, longer than any test."""
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), times_s)
    return tiny(
        folder,
        JOB,
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": 2, "microbatches": 2, "partition": "dynpipe", **pipeline},
        cluster={"device": "emulated", "emulated": modelled, "resources_per_rank": {"CPU": 1.0}},
    )


def state_at(folder: Path, step: int) -> str:
    """The state of the same job at `step`, on one rank of this process, undisturbed."""
    spec = long_job(folder, 0.0, ranks=1)
    spec = spec.model_copy(update={"pipeline": spec.pipeline.model_copy(update={"partition": "parameter"})})
    return run_threads(replace(job_of(spec), stop_at=step)).state_sha256


class Log:
    """The events of the job so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = JobFolder(str(folder))

    def of(self, kind: type[Kind]) -> list[Kind]:
        lines = self._folder.events_path.read_text().splitlines()
        known = [events.Record.from_json(line).event for line in lines]
        return [event for event in known if isinstance(event, kind)]


@pytest.mark.usefixtures("cluster")
def test_a_job_is_scaled_cut_otherwise_and_drained_to_the_same_bits(tmp_path: Path) -> None:
    client, log = BlockingJobClient(), Log(tmp_path / JOB)
    # Slow enough for three ranks to be worth their messages, which a busy machine measures as slow.
    client.submit(long_job(tmp_path, 0.012))

    def done(command: Command) -> str:
        return client.outcome(command, timeout_s=PATIENCE_S).text

    def members() -> tuple[int, ...]:
        return client.view(JOB).ranks.members

    wait_for_step(client, 2)

    # What cannot be is refused in words, and changes nothing.
    for ask, why in (
        (lambda: client.scale(JOB), "Give a number of ranks, of spares, or both"),
        (lambda: client.scale(JOB, ranks=0), "a pipeline has at least 1 rank, and 0 are asked for"),
        (lambda: client.scale(JOB, ranks=7), "the model has 6 layers"),
        (lambda: client.scale(JOB, ranks=5), "the job has 2, and the cluster has room for 2 more"),
        (lambda: client.drain(JOB, "nowhere"), "there is no node 'nowhere'; the job's nodes: "),
        (lambda: client.apply(JOB, [1, 2, 3]), r"names 3 stages, but ranks x chunks make 2"),
    ):
        with pytest.raises(Refused, match=why):
            ask()

    assert done(client.scale(JOB, ranks=3, by="a test")) == "trains on with 3 ranks"
    assert len(members()) == 3

    proposal = client.propose(JOB)
    assert sum(proposal.partition) == 6
    assert proposal.candidates
    wished = (1, 3, 2) if proposal.current_partition != (1, 3, 2) else (2, 3, 1)
    proposal = client.propose(JOB, wished)
    assert (proposal.partition, proposal.problem) == (wished, None)
    assert proposal.predicted_step_s is not None
    assert proposal.current_predicted_step_s is not None
    assert len(proposal.peak_memory_bytes) == len(proposal.memory_limit_bytes) == 3
    assert done(client.apply(JOB, wished, base=proposal.base, by="control from 127.0.0.1")) == "moved"
    (migrated,) = log.of(events.Migrated)
    assert migrated.layers == proposal.moved_layers
    with pytest.raises(PlanChanged, match="is not the newest one any more") as changed:
        client.apply(JOB, [2, 2, 2], base=proposal.base)
    assert (changed.value.epoch, changed.value.version) == client.propose(JOB).base
    assert changed.value.version > proposal.base[1]
    reasons = [decision.plan.reason for decision in client.view(JOB).decisions]
    assert any("requested by control from 127.0.0.1" in reason for reason in reasons)

    # The ranks go by a partition of their own until the next regroup.
    assert done(client.scale(JOB, ranks=2, spares=1)) == "trains on with 2 ranks"
    view = client.view(JOB)
    assert (len(view.ranks.members), len(view.ranks.spares)) == (2, 1)

    nodes = client.view(JOB).ranks.nodes
    gone = nodes[members()[0]]
    leaving = {rank for rank, node in nodes.items() if node == gone}
    told = done(client.drain(JOB, gone[:16], deadline_s=60.0))
    assert told == f"node {gone[:12]} has no rank of the job any more"
    (noticed,) = log.of(events.Noticed)
    assert (noticed.source, noticed.node, set(noticed.ranks)) == ("request", gone, leaving)
    there = client.view(JOB).ranks
    assert not leaving & {*there.members}
    assert gone not in {there.nodes[rank] for rank in there.members}
    others = set(nodes.values()) - {gone}
    with pytest.raises(Refused, match="nowhere to go: without node"):
        client.drain(JOB, others.pop())

    client.stop(JOB)
    finished = wait_for_end(client)
    assert finished.state_sha256 == state_at(tmp_path / "quiet", finished.step)
    steps = [report.step for report in log.of(StepReport)]
    assert steps == list(range(1, finished.step + 1))
    regrouped = log.of(events.Regrouped)
    assert [each.cause for each in regrouped][:2] == ["scale", "scale"]
    assert not any(each.steps_lost or each.rerun for each in regrouped)
    assert not log.of(events.RankFailed)
    assert "a test" in {command.by for command in log.of(events.Commanded)}
    client.dismiss(JOB)


def wait_for_step(client: BlockingJobClient, step: int) -> None:
    for record in client.events(JOB):
        assert isinstance(record, events.Record)
        assert not isinstance(record.event, events.Failed), record.event
        if isinstance(record.event, StepReport) and record.event.step >= step:
            return


def wait_for_end(client: BlockingJobClient) -> events.Finished:
    for record in client.events(JOB):
        if isinstance(record, events.Record) and isinstance(record.event, events.Finished):
            return record.event
    raise AssertionError("the job has no end")
