"""Lower bound on the step time of a shape, whatever its cut; needs neither schedule nor simulation.

With one stage per rank a stage cannot begin before the first microbatch has come through those before it, cannot send
back what the stages after it have not answered, and works off the rest between the first answer and the last forward.
The least step is then the least limit under which the stages, each as long as the limit allows, reach the last layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.profile import Profile
from planner.schedule.registry import families
from planner.search.shapes import PipelineShape

_ROUNDING = 1e-9
"""Relative: sums in different orders differ by less."""


def can_take(
    profile: Profile, shape: PipelineShape, recompute: Collection[int], windows: int, step_s: float
) -> bool:
    """False: no cut of `shape` has a step of at most `step_s`, with `windows` windows in a row and the commit.

    Args:
        profile: as the programs see it, with one pipeline's devices.
        recompute: layers that run their forward twice.
    """
    ahead = _AHEAD.get(shape.name)
    if ahead is None or shape.given is not None or shape.chunks > 1 or step_s == float("inf"):
        return True
    slowdowns = [device.slowdown for device in profile.cluster.devices[: shape.ranks]]
    compute = _Compute.of(profile, recompute, splits=families()[shape.name].splits_backward)
    chain = _Chain(compute, slowdowns, _hop_s(profile, shape.ranks), shape, windows, ahead)
    return chain.reaches((step_s - profile.cluster.commit_s) * (1 + _ROUNDING))


_AHEAD: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda after, microbatches: microbatches,
    "1f1b": lambda after, microbatches: min(microbatches, after + 1),
    "zb-h1": lambda after, microbatches: min(microbatches, after + 1),
}
"""Family -> (stages after one, microbatches) -> forwards of that stage in a window before its first backward."""


class _Compute(NamedTuple):
    """Seconds of the layers before each, on a device of slowdown 1; L + 1 each."""

    busy: list[float]
    """All that a rank computes for one microbatch."""
    answered: list[float]
    """Part of `busy` before the rank has sent back the last gradient."""
    trip: list[float]
    """Compute that one microbatch waits for on its way there and back."""
    there: list[float]
    """Compute that it waits for on its way there."""
    later: list[float]
    """Weight gradients that are not part of the way."""

    @staticmethod
    def of(profile: Profile, recompute: Collection[int], *, splits: bool) -> _Compute:
        layers = profile.model.layers
        there = np.array([layer.forward_s for layer in layers])
        later = np.array([layer.weight_grad_s if splits else 0.0 for layer in layers])
        trip = there + np.array([layer.backward_s for layer in layers]) - later
        again = np.zeros(len(layers))
        again[sorted(recompute)] = there[sorted(recompute)]
        parts = (trip + again + later, trip + again, trip, there, later)
        return _Compute(*([0.0, *np.cumsum(of).tolist()] for of in parts))


def _hop_s(profile: Profile, ranks: int) -> float:
    """The least that a message from one stage to the next and one back take together, without what receives them."""
    layers = profile.model.layers[:-1]
    pairs = [*pairwise(range(ranks))]
    if not layers or not pairs:
        return 0.0
    sizes = min(layer.boundary_bytes for layer in layers), min(layer.boundary_grad_bytes for layer in layers)
    link = profile.cluster.link
    return min(
        sum(
            one.sender_busy_s(size) + one.link_busy_s(size) + one.latency_s
            for one, size in zip((link(a, b), link(b, a)), sizes, strict=True)
        )
        for a, b in pairs
    )


@dataclass(frozen=True)
class _Chain:
    """A pipeline with one stage per rank, in the order of ranks."""

    compute: _Compute
    slowdowns: list[float]
    hop_s: float
    shape: PipelineShape
    windows: int
    ahead: Callable[[int, int], int]

    def reaches(self, limit_s: float) -> bool:
        """Whether the stages can hold all layers with a step of `limit_s`: a stage that begins later can always end at
        least as late, so each takes what it can."""
        busy, answered, trip, there, later = self.compute
        layers, stages = len(busy) - 1, self.shape.ranks
        microbatches = self.windows * self.shape.microbatches
        fastest, whole_s = min(self.slowdowns), trip[-1] * min(self.slowdowns)
        first = 0
        for stage, slow in enumerate(self.slowdowns):
            after = stages - stage - 1
            # The first microbatch comes through the stages before, and the last one goes back through them.
            room_s = limit_s - trip[first] * fastest - stage * self.hop_s
            stop = bisect_right(answered, answered[first] + room_s / (slow * microbatches)) - 1
            if later[-1]:
                room_s = limit_s - there[first] * fastest
                stop = min(stop, bisect_right(busy, busy[first] + room_s / (slow * microbatches)) - 1)
            ahead = self.ahead(after, self.shape.microbatches)
            between = microbatches - ahead - 1
            if self.shape.name == "gpipe" and self.windows == 1 and microbatches > 1:
                # The last forward comes through, behind the slowest; then the last backward, behind the slowest.
                room_s = limit_s - whole_s - (stages - 1) * self.hop_s
                most = trip[first] + room_s / (slow * (microbatches - 1))
                stop = min(stop, bisect_right(trip, most) - 1)
            elif between > 0:
                # From the first answer to the last forward: forwards, backwards and the weight gradients due by then.
                drained = max(0, self.shape.microbatches - stages) if later[-1] else 0
                due = microbatches - self.shape.microbatches + drained
                room_s = limit_s - 2 * whole_s + trip[first] * fastest - (stages - 1 + after) * self.hop_s

                def taken_s(layer: int, between: int = between, due: int = due, slow: float = slow) -> float:
                    return slow * (between * trip[layer] + due * later[layer])

                most = bisect_right(range(layers + 1), taken_s(first) + room_s, key=taken_s) - 1
                stop = min(stop, most)
            stop = min(stop, layers - after)
            if stop <= first:
                return False
            first = stop
        return first == layers
