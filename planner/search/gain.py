"""Whether another layout saves more over the rest of the job than the change to it costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from planner.wording import counted, seconds


@dataclass(frozen=True, kw_only=True)
class ComparedPlans:
    """The plan in force beside the best one for some ranks."""

    now: Plan
    then: Plan
    ranks: int
    """Number of ranks that `then` may use."""
    now_s: float
    """Predicted step of `now`; without a profile in units of one microbatch on one rank that holds the whole model."""
    then_s: float
    predicted: bool
    """Whether a profile predicts them."""
    same: bool
    """Whether ranks compute and send the same under both."""


def pays(
    compared: ComparedPlans, remaining_steps: int, cost_s: float, *, step_s: float | None = None
) -> tuple[bool, str]:
    """Whether the other plan saves more over the rest of the job than the change costs; and why.

    Args:
        cost_s: training time that the change costs.
        step_s: a measured step; without it, the predicted one.
    """
    now, then, ranks = compared.now, compared.then, compared.ranks
    if compared.same:
        return False, f"the best layout of {counted(ranks, 'rank')} is the one that they have"
    ratio = compared.then_s / compared.now_s
    before_s = step_s if step_s is not None else compared.now_s if compared.predicted else None
    how = f"with {counted(ranks, 'rank')} instead of {now.world_size}"
    if ranks == now.world_size:
        how = f"as {counted(then.pipeline_count, 'pipeline')} of {counted(then.pipeline_ranks, 'rank')}"
    summary = f"{how} a step takes"
    if before_s is None:
        summary += f" {ratio:.1%} of what it takes now, by the number of stages alone"
        return ratio < 1 and remaining_steps > 0, f"{summary}; no step has been measured"
    saved_s = (1 - ratio) * before_s * remaining_steps
    summary += f" {seconds(ratio * before_s)} instead of {seconds(before_s)}"
    if saved_s <= 0:
        return False, f"{summary}: nothing is saved"
    summary += f": over {counted(remaining_steps, 'step')} that saves {seconds(saved_s)}"
    return saved_s > cost_s, f"{summary}, and the change costs {seconds(cost_s)}"
