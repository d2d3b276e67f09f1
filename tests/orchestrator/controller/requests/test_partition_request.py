"""What a job says of another partition: its predictions, why it cannot be, and for which plan it was meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.controller.requests.partition_request import move_to_partition, propose
from orchestrator.history.proposal import PlanChanged, Proposal
from orchestrator.lifecycle import moves
from orchestrator.lifecycle.migration import RequestedMove
from orchestrator.lifecycle.states import JobData, Membership, Order, Progress
from orchestrator.prepare.planning import replanner_of
from planner.search.replan import Replanner
from workers.protocol.errors import JobError

ROOMY = 10**9


def begun(
    folder: Path, memory_bytes: int | None = ROOMY, **pipeline: Any
) -> tuple[JobData, Replanner, Order]:
    """A job of ten layers on four ranks, 2-3-3-2, version 4 of epoch 2.

    Args:
        memory_bytes: of each rank; None: the job has no profile.
    """
    done = resolved(tiny(folder, "job", model={"layers": 8}, pipeline=pipeline))
    plan = replace(done.plan, epoch=2, version=4)
    job = JobData(
        progress=Progress(plan=plan, schedule=done.schedule, version=4),
        membership=Membership(members=(0, 1, 2, 3), nodes={rank: f"n{rank}" for rank in range(4)}),
    )
    replanner = replanner_of(done)
    if memory_bytes is not None:
        parameters = (1_000_000,) * 10
        profile = made_profile(done.outline.layers, parameters, 4, memory_bytes=memory_bytes)
        replanner = replace(replanner, profile=profile, parameters=parameters)
    order = Order(
        job="job",
        epoch=2,
        generation=1,
        plan=plan,
        schedule=done.schedule,
        checkpoints=(),
        timeout_s=1.0,
    )
    return job, replanner, order


def apply(
    job: JobData, replanner: Replanner, partition: tuple[int, ...], base: tuple[int, int] | None
) -> RequestedMove:
    return move_to_partition(
        job, replanner, partition, base, mode="live", asked_s=0.0, id="x", by="control from 10.0.0.9"
    )


def test_a_partition_is_simulated_and_changes_nothing(tmp_path: Path) -> None:
    job, replanner, _ = begun(tmp_path)
    proposal = propose(job, replanner, (4, 2, 2, 2))
    assert (proposal.partition, proposal.current_partition) == ((4, 2, 2, 2), (2, 3, 3, 2))
    assert (proposal.base, proposal.problem) == ((2, 4), None)
    assert proposal.moved_layers == (2, 3, 5)
    assert proposal.predicted_step_s is not None
    assert proposal.current_predicted_step_s is not None
    assert proposal.predicted_step_s > proposal.current_predicted_step_s
    assert proposal.memory_limit_bytes == (ROOMY,) * 4
    # The place with four layers needs the most, copies of others apart.
    assert proposal.peak_memory_bytes.index(max(proposal.peak_memory_bytes)) == 0
    assert Proposal.from_json(proposal.to_json()) == proposal


def test_the_planners_own_best_is_at_least_as_fast_as_any_cut_that_it_compared(tmp_path: Path) -> None:
    job, replanner, _ = begun(tmp_path)
    worse = replace(
        job,
        progress=replace(
            job.progress, plan=replace(job.progress.plan, layers=((0, 6), (6, 7), (7, 8), (8, 10)))
        ),
    )
    proposal = propose(worse, replanner, None)
    assert proposal.problem is None
    assert proposal.predicted_step_s is not None
    times = [one.predicted_step_s for one in proposal.candidates if one.predicted_step_s is not None]
    assert len(times) >= 2
    assert proposal.predicted_step_s == pytest.approx(min(times))
    assert proposal.current_predicted_step_s is not None
    assert proposal.predicted_step_s < proposal.current_predicted_step_s


def test_without_a_profile_nothing_is_predicted(tmp_path: Path) -> None:
    job, replanner, _ = begun(tmp_path, None)
    proposal = propose(job, replanner, (4, 2, 2, 2))
    assert (proposal.problem, proposal.predicted_step_s, proposal.candidates) == (None, None, ())
    assert (
        propose(job, replanner, None).problem == "the ranks have that partition already: nothing would move"
    )


@pytest.mark.parametrize(
    ("partition", "problem"),
    [
        ((2, 3, 3), "names 3 stages, but ranks x chunks make 4"),
        ((2, 3, 3, 3), "covers 11 layers, but the model has 10"),
        ((10, 0, 0, 0), "has a stage with no layer"),
        ((2, 3, 3, 2), "the ranks have that partition already"),
    ],
)
def test_a_partition_that_cannot_be_says_why(
    tmp_path: Path, partition: tuple[int, ...], problem: str
) -> None:
    job, replanner, _ = begun(tmp_path)
    proposal = propose(job, replanner, partition)
    assert proposal.problem is not None
    assert problem in proposal.problem
    with pytest.raises(JobError, match=problem):
        apply(job, replanner, partition, None)


def test_a_partition_that_does_not_fit_the_memory_says_by_how_much(tmp_path: Path) -> None:
    job, replanner, _ = begun(tmp_path, 130_000_000)
    proposal = propose(job, replanner, (7, 1, 1, 1))
    assert proposal.problem is not None
    assert "place 0 would need" in proposal.problem
    assert proposal.peak_memory_bytes[0] > proposal.memory_limit_bytes[0]
    with pytest.raises(JobError, match="more than its device has"):
        apply(job, replanner, (7, 1, 1, 1), None)


def test_it_is_applied_to_the_plan_that_it_was_made_for_or_not_at_all(tmp_path: Path) -> None:
    job, replanner, order = begun(tmp_path)
    move = apply(job, replanner, (4, 2, 2, 2), (2, 4))
    assert move.plan.reason.startswith(
        "partition [4, 2, 2, 2], requested by control from 10.0.0.9: a step is"
    )
    assert (move.id, move.plan.partition) == ("x", "explicit")
    with pytest.raises(
        PlanChanged, match=r"plan 2\.3 is not the newest one any more: look at plan 2\.4"
    ) as old:
        apply(job, replanner, (4, 2, 2, 2), (2, 3))
    assert (old.value.epoch, old.value.version) == (2, 4)

    # A move that stops the ranks has no version before they have regrouped.
    stopping, _ = moves.request(order, job, replace(move, mode="stop"))
    with pytest.raises(PlanChanged, match=r"plan 2\.4: ask again once its layers have moved"):
        apply(stopping, replanner, (3, 3, 2, 2), (2, 4))

    # Once a move is under way, its plan is the newest one; a second one that waits will change that again.
    job, _ = moves.request(order, job, move)
    with pytest.raises(PlanChanged) as moving:
        apply(job, replanner, (3, 3, 2, 2), (2, 4))
    assert (moving.value.epoch, moving.value.version) == (2, 5)
    after = apply(job, replanner, (3, 3, 2, 2), (2, 5))
    assert propose(job, replanner, (3, 3, 2, 2)).current_partition == (4, 2, 2, 2)
    job, _ = moves.request(order, job, after)
    assert job.intents.moves == (after,)
    with pytest.raises(PlanChanged, match=r"another move is about to change plan 2\.5"):
        apply(job, replanner, (2, 4, 2, 2), (2, 5))
    # A move by its layers begins where those before it end.
    last = move_of_layers(job, replanner, (5, 6), 2, mode="live", asked_s=0.0)
    assert last.base == after.plan
    assert last.plan.layers == ((0, 3), (3, 5), (5, 8), (8, 10))
