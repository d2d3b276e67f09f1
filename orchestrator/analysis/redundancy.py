"""Ranks with layers that no other rank has. Pure: a job's view in, places out."""

from __future__ import annotations

from orchestrator.history.job_view import JobView


def places_without_redundancy(view: JobView) -> tuple[int, ...] | None:
    """Places whose loss sends the job back to a checkpoint: they own a layer of which no other place has an up-to-date
    copy, or a snapshot. None if the job wants no copies or does not train."""
    plan, elastic = view.followed, view.spec.get("elastic", {})
    if plan is None or view.state != "training" or elastic.get("redundancy") != "peer":
        return None
    if plan.pipeline_count > 1 and plan.shards == 1:  # the other pipelines have every layer
        return ()
    here = view.ranks.copied
    copied = {
        piece for piece, places in plan.kept or plan.copied if any(piece in here.get(at, ()) for at in places)
    }
    return tuple(place for place in range(plan.world_size) if {*plan.pieces_of_place(place)} - copied)
