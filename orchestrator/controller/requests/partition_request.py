"""Another partition for a training job: what it would bring, or why it cannot be; and the move to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.controller.requests.move_request import domains_of, move_to
from orchestrator.history.proposal import PlanChanged, Proposal
from orchestrator.lifecycle.migration import Mode, RequestedMove, moved_layers
from orchestrator.lifecycle.moves import expected, newest_version
from orchestrator.lifecycle.states import JobData
from planner.plan import Plan, PlanError
from planner.search import recut
from planner.search.alternatives import Alternative
from planner.search.replan import Replanner
from workers.protocol.errors import JobError


def propose(
    job: JobData,
    replanner: Replanner,
    partition: Sequence[int] | None,
    slowdowns: Sequence[float | None] | None = None,
) -> Proposal:
    """Validate and simulate `partition`; None: the planner's own best for the same ranks and schedule.

    Args:
        slowdowns: by place, as far as they are known.
    """
    now = expected(job)[0]
    domains = domains_of(job)
    base, current = newest_version(job), now.layers_per_stage
    before = recut.predicted(replanner, now, domains, slowdowns)
    candidates: tuple[Alternative, ...] = ()
    own, problem = None, None
    try:
        own, candidates = recut.best(replanner, now, domains, slowdowns)
    except PlanError as error:
        problem = str(error)
    unchanged = Proposal(
        partition=current if partition is None else tuple(partition),
        current_partition=current,
        base=base,
        problem=problem,
        current_predicted_step_s=None if before is None else before.step_s,
        candidates=candidates,
    )
    if partition is None and own is None:
        return unchanged
    try:
        plan = own
        if partition is not None or plan is None:
            plan = recut.with_counts(now, partition or ())
    except PlanError as error:
        return replace(unchanged, problem=str(error))
    return _simulated(job, replanner, now, plan, unchanged, slowdowns)


def _simulated(
    job: JobData,
    replanner: Replanner,
    now: Plan,
    plan: Plan,
    unchanged: Proposal,
    slowdowns: Sequence[float | None] | None,
) -> Proposal:
    domains = domains_of(job)
    plan = replanner.with_standbys(plan, domains)
    moved = moved_layers(now, plan)
    after = recut.predicted(replanner, plan, domains, slowdowns)
    proposal = replace(unchanged, partition=plan.layers_per_stage, moved_layers=moved, problem=None)
    if after is not None:
        limits = [device.memory_bytes for device in after.profile.cluster.devices]
        peaks = after.memory.peak_bytes
        proposal = replace(
            proposal,
            predicted_step_s=after.step_s,
            peak_memory_bytes=tuple(peaks),
            memory_limit_bytes=tuple(limits[: len(peaks)]),
        )
    if not moved:
        return replace(proposal, problem="the ranks have that partition already: nothing would move")
    try:
        move_to(job, replanner, plan, mode="live", asked_s=0.0)
    except PlanError as error:
        return replace(proposal, problem=str(error))
    return proposal


def move_to_partition(
    job: JobData,
    replanner: Replanner,
    partition: Sequence[int],
    base: tuple[int, int] | None,
    *,
    mode: Mode,
    asked_s: float,
    id: str,
    by: str,
    slowdowns: Sequence[float | None] | None = None,
) -> RequestedMove:
    """Return the move to `partition`.

    Args:
        base: (epoch, version) of the plan that it is to replace; None: whichever is the newest.
        id: of the command.
        by: who sent it.

    Raises:
        PlanChanged: the newest plan is another one than `base`.
        JobError: the partition is none, changes nothing, or does not fit the memory.
    """
    check_base(job, base)
    proposal = propose(job, replanner, partition, slowdowns)
    if proposal.problem is not None:
        raise JobError(proposal.problem)
    now = expected(job)[0]
    plan = recut.with_counts(now, partition)
    reason = f"partition {list(partition)}, requested by {by or 'a client'}"
    if proposal.predicted_step_s is not None and proposal.current_predicted_step_s is not None:
        reason += (
            f": a step is predicted to take {proposal.predicted_step_s:.3g} s instead of"
            f" {proposal.current_predicted_step_s:.3g} s"
        )
    move = move_to(
        job, replanner, replace(plan, reason=reason), mode=mode, asked_s=asked_s, slowdowns=slowdowns
    )
    return replace(move, id=id)


def check_base(job: JobData, base: tuple[int, int] | None) -> None:
    """Check that `base` is the version of the newest plan, and that no other one is about to be issued.

    Raises:
        PlanChanged: it is not.
    """
    if base is None:
        return
    epoch, version = newest_version(job)
    if base != (epoch, version):
        raise PlanChanged(
            f"plan {base[0]}.{base[1]} is not the newest one any more: look at plan {epoch}.{version}, then"
            " decide again",
            epoch,
            version,
        )
    migration = job.intents.migration
    # A move that stops the ranks gets its version only once they have regrouped.
    if job.intents.moves or (migration is not None and migration.move.mode == "stop"):
        raise PlanChanged(
            f"another move is about to change plan {epoch}.{version}: ask again once its layers have moved",
            epoch,
            version,
        )
