"""The message when no plan fits the memory: where, by how much, and what would help. Knows no search."""

from __future__ import annotations

from planner.simulation.predict import Prediction
from planner.wording import counted


def shortfall(
    closest: Prediction, recomputing: Prediction | None, without_copies: Prediction | None = None
) -> str:
    """The message, as text for people.

    Args:
        closest: the plan that exceeds the memory least.
        recomputing: the same plan with all layers but the last recomputing; None if `closest` already has that.
        without_copies: the same plan without standbys; None if `closest` has none.
    """
    devices = closest.profile.cluster.devices
    rank = max(range(len(closest.excess_bytes)), key=lambda rank: closest.excess_bytes[rank])
    over, limit = closest.excess_bytes[rank], devices[rank].memory_bytes
    peak = closest.memory.ranks[rank].peak
    state = peak.weights + peak.gradients + peak.optimizer + peak.statistics
    alone = ""
    if without_copies is not None and without_copies.fits:
        alone = '; or elastic.redundancy = "checkpoint", which keeps no copies: then it fits'
    copies = f"{peak.standbys:,} for copies of other ranks' layers, " if peak.standbys else ""
    rest = over + limit - state - peak.standbys
    plan = closest.plan
    counts = list(plan.layers_per_stage)
    return (
        f"nothing fits the memory. The closest, {plan.schedule} on {counted(plan.pipeline_ranks, 'rank')} with {counts}"
        f" layers per stage, needs {over + limit:,} bytes on rank {rank}, {over:,} more than the {limit:,} it may use"
        f" ({state:,} for weights, gradients and optimizer state, {copies}{rest:,} for activations and what waits)."
        f" {_help(state, limit, recomputing)}{alone}"
    )


def _help(state: int, limit: int, recomputing: Prediction | None) -> str:
    larger = "more ranks (pipeline.ranks) or devices with more memory"
    if state > limit:
        return f"What would help: {larger}; the state alone does not fit, whatever the microbatch"
    smaller = f"a smaller pipeline.microbatch_size, {larger}"
    if recomputing is None:
        return f"What would help: {smaller}; every layer that can save memory so recomputes already"
    lacking = max(recomputing.excess_bytes)
    if lacking:
        return (
            f"What would help: {smaller}; recomputing (pipeline.recompute = true) leaves {lacking:,}"
            " bytes over"
        )
    return f"What would help: pipeline.recompute = true, with which it fits; {smaller}"
