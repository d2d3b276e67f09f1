"""What every run of consecutive layers would cost as a stage of a given schedule: the common ground of the
partition programs. Time and memory of one microbatch's work, as matrices; no program, no objective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.ir import Kind, Schedule
from planner.profile import Link, Profile

Matrix = NDArray[np.float64]
"""`matrix[stop, first]` of the layers [first, stop), float64[L + 1, L + 1]; of no meaning where first >= stop."""
Vector = NDArray[np.float64]
"""`vector[cut]`: of a cut in front of layer `cut`, float64[L + 1]; 0 at 0 and L."""
Window = tuple[slice, slice]
"""The stops and the firsts of a part of a matrix."""
WHOLE: Window = (slice(None), slice(None))
Ranges = tuple[tuple[int, int], ...]
"""Per stage, its layers as [first, stop)."""


@dataclass(frozen=True)
class StageCosts:
    """A profile seen through a schedule: which rank holds which stage, and how much it has in flight."""

    profile: Profile
    stage_ranks: tuple[int, ...]
    """Per stage, its rank: device `rank` of the profile's cluster."""
    in_flight: tuple[tuple[tuple[int, int], ...], ...]
    """Per stage, every (microbatches whose activations are kept, microbatches whose weight gradient waits) that
    no other one exceeds in both."""
    recompute: frozenset[int] = frozenset()
    """Layers that keep their input only, and run forward twice."""
    reserved_bytes: Mapping[int, int] = field(default_factory=dict)
    """Per rank, what stages may not use of its memory."""

    @staticmethod
    def of(profile: Profile, schedule: Schedule, recompute: Collection[int] = ()) -> StageCosts:
        """The costs of `schedule`'s stages. `schedule` need hold no R: which stages recompute depends on the cut."""
        return StageCosts(
            profile,
            tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages)),
            tuple(_in_flight(schedule, stage) for stage in range(schedule.stages)),
            frozenset(recompute),
        )

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def layers(self) -> int:
        return len(self.profile.model.layers)

    def time_s(self, stage: int, at: Window = WHOLE) -> Matrix:
        """Forward, backward and recomputation of one microbatch, on the stage's device."""
        return self.compute_s[at] * self.slowdown(stage)

    def slowdown(self, stage: int) -> float:
        return self.profile.cluster.devices[self.stage_ranks[stage]].slowdown

    def memory_bytes(self, stage: int, at: Window = WHOLE) -> Matrix:
        """Weights, gradients, optimizer state, and the most activations and waiting weight gradients at once.

        What an action needs meanwhile, scratch and messages that wait are left out: `planner/simulation/memory.py`
        counts those, and `planner/search/evaluate.py` reserves what they take.
        """
        arrives = stage > 0 and self.stage_ranks[stage - 1] != self.stage_ranks[stage]
        most = self.activation_bytes(self.in_flight[stage], arrives=arrives, at=at)
        return np.add(most, self.state_bytes[at], out=most)

    def activation_bytes(
        self, in_flight: Iterable[tuple[int, int]], *, arrives: bool, at: Window = WHOLE
    ) -> Matrix:
        """The most that activations, waiting weight gradients and one recomputation take at once.

        Args:
            in_flight: as the field.
            arrives: whether the input comes from another rank; else the stage before keeps it as its output.
        """
        kept = self._kept_bytes[at]
        if arrives:
            kept = kept + self._arriving_bytes[at[1]]
        peaks = [
            count * kept + waiting * self._hold_bytes[at] if waiting else count * kept
            for count, waiting in in_flight
        ]
        most = np.maximum.reduce(peaks) if len(peaks) > 1 else peaks[0]
        return np.add(most, self._rebuilt_bytes[at], out=most) if self.recompute else most

    def limit_bytes(self, stage: int) -> float:
        """What the stage may use: an equal part of its device's memory where the rank holds several stages.

        With one stage per rank this is the limit itself; else it is a rule for the programs, which see one
        stage at a time, and whoever takes their cut checks the ranks.
        """
        rank = self.stage_ranks[stage]
        free = self.profile.cluster.devices[rank].memory_bytes - self.reserved_bytes.get(rank, 0)
        return max(1, free) / self.stage_ranks.count(rank)

    def link(self, source: int, target: int) -> Link | None:
        """From the rank of stage `source` to that of stage `target`; None on the same rank."""
        a, b = self.stage_ranks[source], self.stage_ranks[target]
        return None if a == b else self.profile.cluster.link(a, b)

    @cached_property
    def compute_s(self) -> Matrix:
        """`time_s` on a device of slowdown 1."""
        return range_sums(
            layer.forward_s * (2 if index in self.recompute else 1) + layer.backward_s
            for index, layer in enumerate(self.profile.model.layers)
        )

    @cached_property
    def state_bytes(self) -> Matrix:
        """Weights, gradients, optimizer state and what else is kept: what does not depend on the schedule."""
        return range_sums(
            layer.state_bytes + layer.gradient_bytes + layer.sample_bytes
            for layer in self.profile.model.layers
        )

    @cached_property
    def forward_bytes(self) -> Vector:
        """The activation message over each cut."""
        return self._cuts(layer.boundary_bytes for layer in self.profile.model.layers)

    @cached_property
    def backward_bytes(self) -> Vector:
        """The gradient message back over each cut."""
        return self._cuts(layer.boundary_grad_bytes for layer in self.profile.model.layers)

    @cached_property
    def _kept_bytes(self) -> Matrix:
        """Of one microbatch, from forward to backward."""
        return range_sums(
            self._own_input_bytes(index) + layer.kept_bytes(recomputes=index in self.recompute)
            for index, layer in enumerate(self.profile.model.layers)
        )

    @cached_property
    def _arriving_bytes(self) -> Vector:
        """The input of a stage whose first layer is `cut`, as far as the layers alone do not keep it."""
        layers = self.profile.model.layers
        sizes = [layer.input_bytes - self._own_input_bytes(index) for index, layer in enumerate(layers)]
        return np.array([0, *sizes[1:], 0], dtype=np.float64)

    @cached_property
    def _rebuilt_bytes(self) -> Matrix:
        """What a recomputation brings back, of one microbatch."""
        return range_sums(
            layer.rebuilt_bytes(first=index == 0) if index in self.recompute else 0
            for index, layer in enumerate(self.profile.model.layers)
        )

    def _own_input_bytes(self, index: int) -> int:
        """What a layer keeps of its inputs, if the layer before is on the same rank: nothing, if that keeps them as its
        outputs. The first layer's are counted among its activations."""
        counted = index not in self.recompute if index == 0 else index - 1 not in self.recompute
        return 0 if counted else self.profile.model.layers[index].input_bytes

    @cached_property
    def _hold_bytes(self) -> Matrix:
        return range_sums(layer.weight_grad_hold_bytes for layer in self.profile.model.layers)

    def _cuts(self, sizes: Iterable[int]) -> Vector:
        return np.array([0, *list(sizes)[:-1], 0], dtype=np.float64)


def range_sums(values: Iterable[float]) -> Matrix:
    """The sum of the layers' values over every layer range: `matrix[stop, first]`."""
    sums = np.concatenate([[0.0], np.cumsum([*values], dtype=np.float64)])
    return sums[:, None] - sums[None, :]


def _in_flight(schedule: Schedule, stage: int) -> tuple[tuple[int, int], ...]:
    """The Pareto front of (kept, waiting) over the program of the stage's rank.

    A microbatch goes from one to the other at the end of its I. On a frozen stage a forward keeps nothing.
    """
    if stage < schedule.frozen_stages:
        return ((1, 0),)
    seen: set[tuple[int, int]] = set()
    kept = waiting = 0
    for action in schedule.programs[schedule.rank_of_stage[stage]]:
        if action.stage != stage:
            continue
        kept += action.kind is Kind.FORWARD
        kept -= action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
        waiting += action.kind is Kind.INPUT_GRAD
        waiting -= action.kind is Kind.WEIGHT_GRAD
        seen.add((kept, waiting))
    front: list[tuple[int, int]] = []
    for pair in sorted(seen, reverse=True):
        if not front or pair[1] > front[-1][1]:
            front.append(pair)
    return tuple(front)
