"""The cost of every layer range as a stage of a given schedule: the input of all partition programs.

Time of one microbatch and memory, as matrices. Knows no program and no objective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import cast

import numpy as np
from numpy.typing import NDArray

from planner.ir import Schedule
from planner.profile import Link, Profile
from planner.schedule.in_flight import Counts, largest_counts
from planner.simulation.layer_memory import LayerMemory, layer_memory
from planner.simulation.shard_parts import master_bytes

Matrix = NDArray[np.float64]
"""`matrix[stop, first]` of the layers [first, stop), float64[L + 1, L + 1]; meaningless where first >= stop."""
Vector = NDArray[np.float64]
"""`vector[cut]` of a cut before layer `cut`, float64[L + 1]; 0 at 0 and L."""
Window = tuple[slice, slice]
"""The rows (stops) and columns (firsts) of a part of a matrix."""
WHOLE: Window = (slice(None), slice(None))
Ranges = tuple[tuple[int, int], ...]
"""Per stage, its layers as [first, stop)."""


@dataclass(frozen=True)
class StageCosts:
    """A profile for the stages of one schedule: which rank holds which stage, and how much it has in flight."""

    profile: Profile
    stage_ranks: tuple[int, ...]
    """Per stage, its rank: device `rank` of the profile's cluster."""
    in_flight: tuple[tuple[Counts, ...], ...]
    """Per stage, the largest counts of microbatches that it holds; see `largest_counts`."""
    recompute: frozenset[int] = frozenset()
    """Layers that keep only their input and run their forward twice."""
    reserved_bytes: Mapping[int, int] = field(default_factory=dict)
    """Per rank, bytes of its memory that stages may not use."""
    blocks: tuple[tuple[int, int], ...] | None = None
    """Runs of layers that no cut divides, [first, stop) each: programs see them as their layers, with the exact costs
    of every run of blocks. None: each layer is one."""
    shards: int = 1
    """Number of shards of each layer's states; a rank counts with an equal part of the states."""
    gradient_shards: int = 1
    """The same of the sums of its gradients."""

    @staticmethod
    def of(
        profile: Profile,
        schedule: Schedule,
        recompute: Collection[int] = (),
        shards: int = 1,
        gradient_shards: int = 1,
    ) -> StageCosts:
        """The costs of the stages of `schedule`, which needs no R: which stages recompute depends on the cut."""
        return StageCosts(
            profile,
            tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages)),
            tuple(largest_counts(schedule, stage) for stage in range(schedule.stages)),
            frozenset(recompute),
            shards=shards,
            gradient_shards=gradient_shards,
        )

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def layers(self) -> int:
        """Number of units to cut: layers, or blocks."""
        return len(self.profile.model.layers) if self.blocks is None else len(self.blocks)

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """Layers before which a cut may be, with 0 and the number of layers."""
        if self.blocks is None:
            return np.arange(len(self.profile.model.layers) + 1)
        return np.array([0, *(stop for _, stop in self.blocks)])

    def time_s(self, stage: int, at: Window = WHOLE) -> Matrix:
        """Forward, backward and recomputation of one microbatch, on the stage's device."""
        return self.compute_s[at] * self.slowdown(stage)

    @cached_property
    def least_s(self) -> Matrix:
        """float64[S, L + 1]: the time of the layers before each cut, on each stage's device. A range takes what lies
        between its bounds, whatever messages come on top."""
        return np.outer([self.slowdown(stage) for stage in range(self.stages)], self.compute_s[:, 0])

    def slowdown(self, stage: int) -> float:
        return self.profile.cluster.devices[self.stage_ranks[stage]].slowdown

    def memory_bytes(self, stage: int, at: Window = WHOLE) -> Matrix:
        """Weights, optimizer state, and the most that gradients and microbatches in flight take at once.

        The working memory of an action, scratch, messages and gradients under way are left out:
        `planner/simulation/memory.py` counts them, and `planner/search/evaluate.py` reserves what they take.
        """
        arrives = stage > 0 and self.stage_ranks[stage - 1] != self.stage_ranks[stage]
        most = self.in_flight_bytes(self.in_flight[stage], arrives=arrives, at=at)
        return np.add(most, self.state_bytes[at], out=most)

    def least_bytes(self, stage: int) -> Vector:
        """The memory of the layers before each cut, for those of the largest counts with which all layers together take
        most. A range takes at least what lies between its bounds."""
        first: Window = (slice(None), slice(0, 1))
        of_counts = [
            self.in_flight_bytes([counts], arrives=False, at=first)[:, 0] for counts in self.in_flight[stage]
        ]
        return self.state_bytes[:, 0] + max(of_counts, key=lambda taken: float(taken[-1]))

    def memory_of_ranges(self, stage: int, firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> Vector:
        """float64[N]: as `memory_bytes`, of N single ranges."""
        return self.memory_bytes(stage, cast("Window", (stops, firsts)))

    def in_flight_bytes(self, in_flight: Iterable[Counts], *, arrives: bool, at: Window = WHOLE) -> Matrix:
        """The most that gradients, activations and waiting weight gradients take at once.

        Args:
            in_flight: as the field.
            arrives: whether the input comes from another rank; else the stage before keeps it as its output.
        """
        first, *rest = in_flight
        kept = self._kept_bytes[at]
        if arrives:
            kept = kept + self._arriving_bytes[at[1]]

        def taken(counts: Counts) -> Matrix:
            taken = counts.activations * kept
            if counts.gradients:
                taken += self.gradient_bytes[at]
            if counts.waiting:
                taken += counts.waiting * self._hold_bytes[at]
            if counts.rebuilt and self.recompute:
                taken += counts.rebuilt * self._rebuilt_bytes[at]
            return taken

        return reduce(lambda most, counts: np.maximum(most, taken(counts), out=most), rest, taken(first))

    def limit_bytes(self, stage: int) -> float:
        """The memory that the stage may use: an equal part of its device's where the rank holds several stages.

        With one stage per rank this is the device's limit. With several it is a rule for the programs, which see one
        stage at a time; the caller checks the ranks of the resulting cut.
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
        layers = self.profile.model.layers
        own = self._sums(
            layer.forward_s * (2 if index in self.recompute else 1) + layer.backward_s
            for index, layer in enumerate(layers)
        )
        own[:, 1:] += self._sums(layer.kept_s for layer in layers)[:, 1:]  # ranges after the first stage
        return own

    @cached_property
    def state_bytes(self) -> Matrix:
        """Weights, optimizer state and what freezing keeps: what does not depend on the schedule."""
        elsewhere = 1 - 1 / self.shards
        return self._sums(
            layer.state_bytes
            + layer.sample_bytes
            - elsewhere
            * (
                layer.optimizer_bytes
                + layer.statistics_bytes
                + layer.sample_bytes
                + master_bytes(self.profile, layer)
            )
            for layer in self.profile.model.layers
        )

    @cached_property
    def gradient_bytes(self) -> Matrix:
        return self._sums(layer.summed_bytes / self.gradient_shards for layer in self.profile.model.layers)

    @cached_property
    def forward_bytes(self) -> Vector:
        """Bytes of the activation message over each cut."""
        return self._cuts(layer.boundary_bytes for layer in self.profile.model.layers)

    @cached_property
    def backward_bytes(self) -> Vector:
        """Bytes of the gradient message back over each cut."""
        return self._cuts(layer.boundary_grad_bytes for layer in self.profile.model.layers)

    @cached_property
    def _layer_memory(self) -> tuple[LayerMemory, ...]:
        return layer_memory(self.profile.model.layers, self.recompute)

    @cached_property
    def _kept_bytes(self) -> Matrix:
        """For one microbatch, from its forward to its backward."""
        return self._sums(layer.kept for layer in self._layer_memory)

    @cached_property
    def _arriving_bytes(self) -> Vector:
        """Bytes that a stage whose first layer is `cut` keeps in addition where its input comes from another rank."""
        arriving = [*(layer.arriving for layer in self._layer_memory), 0]
        return np.array(arriving, dtype=np.float64)[self._bounds]

    @cached_property
    def _rebuilt_bytes(self) -> Matrix:
        """Bytes that a recompute adds for one microbatch."""
        return self._sums(layer.rebuilt for layer in self._layer_memory)

    @cached_property
    def _hold_bytes(self) -> Matrix:
        return self._sums(layer.weight_grad_hold_bytes for layer in self.profile.model.layers)

    def _cuts(self, sizes: Iterable[int]) -> Vector:
        return np.array([0, *list(sizes)[:-1], 0], dtype=np.float64)[self._bounds]

    def _sums(self, values: Iterable[float]) -> Matrix:
        """The sum of the layers' values over every range: `matrix[stop, first]`."""
        return range_sums(values, self._bounds)


def range_sums(values: Iterable[float], bounds: NDArray[np.int64] | None = None) -> Matrix:
    """The sum of the layers' values over every layer range: `matrix[stop, first]`.

    Args:
        bounds: the layers before which ranges begin and stop; None: all.
    """
    sums = np.concatenate([[0.0], np.cumsum([*values], dtype=np.float64)])
    if bounds is not None:
        sums = sums[bounds]
    return sums[:, None] - sums[None, :]
