"""The features of what a rank is to hold, from the model's profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from planner.profile import ModelProfile


def stage_features(model: ModelProfile, stages: Sequence[Sequence[int]]) -> dict[str, float]:
    """Features of `planner.features.STAGE` that follow from profile and plan.

    Args:
        stages: the layers of each stage of the rank, ascending; none is empty.
    """
    layers = [model.layers[number] for stage in stages for number in stage]
    forward_s = sum(layer.forward_s for layer in layers)
    work_s = forward_s + sum(layer.backward_s for layer in layers)
    found = {
        "layers": float(len(layers)),
        "work": work_s,
        "parameters": float(sum(layer.parameters for layer in layers)),
        "messages": float(sum(_sent_bytes(model, stage) for stage in stages)),
    }
    return found | ({"forward_share": forward_s / work_s} if work_s else {})


def _sent_bytes(model: ModelProfile, stage: Sequence[int]) -> int:
    """Bytes that a stage sends per microbatch: its outputs on, and the gradient of its inputs back."""
    onward = model.layers[stage[-1]].boundary_bytes if stage[-1] + 1 < len(model.layers) else 0
    return onward + (model.layers[stage[0] - 1].boundary_grad_bytes if stage[0] else 0)
