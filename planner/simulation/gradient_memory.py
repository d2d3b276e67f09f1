"""Memory of a stage's gradients: their sums, and where siblings share these out, what is formed and under way.

`workers/gradients/reduce_scatter.py` in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from planner.profile import Profile
from planner.shards import Piece
from planner.simulation.shard_parts import gradient_bytes


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Bytes of one stage."""

    summed: tuple[int, ...]
    """Per layer, if it forms any. Where siblings share them out their memory is taken in each step; it counts from the
    start all the same."""
    under_way: int = 0
    """Between actions: the gradients that the rank formed last, which siblings may
    not have yet, and the memory for theirs. With one of the rank's stages."""
    forming: tuple[int, ...] = ()
    """Per layer, the more that there is while its gradients of a microbatch are formed; empty: nothing."""


def gradient_memory(profile: Profile, plan: Plan, stage: int, place: int) -> GradientMemory:
    """Gradient memory of a stage on its rank at `place`."""
    layers = profile.model.layers
    first, stop = plan.layers[stage]
    if plan.shard != "gradients":
        return GradientMemory(summed=tuple(layer.summed_bytes for layer in layers[first:stop]))
    shard = plan.shard_of_place(place)

    def summed(layer: int) -> int:
        return gradient_bytes(layers[layer], Piece(layer, shard))

    def sent(layer: int) -> int:
        """Its own, whole, and for each sibling that of the shard. Alone, they are added at once."""
        return 0 if shard.of == 1 else layers[layer].gradient_bytes + (shard.of - 1) * summed(layer)

    rank = plan.stage_ranks[stage]
    stages = [number for number, holder in enumerate(plan.stage_ranks) if holder == rank]
    last_formed = [
        next((layer for layer in range(*plan.layers[number]) if layers[layer].gradient_bytes), None)
        for number in stages
    ]
    resting = max((sent(layer) for layer in last_formed if layer is not None), default=0)
    forming: list[int] = []
    before = resting
    for layer in reversed(range(first, stop)):
        if layers[layer].gradient_bytes:
            forming.append(before - resting + layers[layer].gradient_bytes)
            before = sent(layer)
        else:
            forming.append(before - resting)
    return GradientMemory(
        summed=tuple(summed(layer) for layer in range(first, stop)),
        under_way=resting if stage == stages[-1] else 0,
        forming=tuple(reversed(forming)),
    )
