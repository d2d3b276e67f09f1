"""Slowdown of each place with the layers that a candidate gives it: known factors, or a model's predictions.

A model of interference sees the device's state and the stage (DynPipe, Algorithm 2, line 13), so a candidate's times
are known only once its layers are. Predictions are asked for in batches, and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PlaceLoad:
    """Layers that a place is to hold."""

    place: int
    """By number, over all pipelines."""
    layers: tuple[tuple[int, int], ...]
    """[first, stop) of each of its stages, ascending."""


class SlowdownModel(Protocol):
    """Predicts slowdowns."""

    def __call__(self, loads: Sequence[PlaceLoad], /) -> Sequence[float]:
        """The factor on the profile's times for each load; above 0. Equal loads have equal factors."""
        ...


@dataclass(frozen=True)
class Known:
    """Slowdowns that do not depend on the layers."""

    by_place: tuple[float, ...]

    def __call__(self, loads: Sequence[PlaceLoad], /) -> Sequence[float]:
        return [self.by_place[load.place] for load in loads]


class SlowdownTable:
    """The slowdowns of many candidates: each distinct load is predicted once.

    Args:
        stages: per pipeline rank of the schedule, its stages.
        pipelines: how many copies of the pipeline run.
    """

    def __init__(self, slowdowns: SlowdownModel, stages: Sequence[Sequence[int]], pipelines: int) -> None:
        self._slowdowns = slowdowns
        self._stages = [tuple(own) for own in stages]
        self._pipelines = pipelines
        self._known: dict[PlaceLoad, float] = {}

    @property
    def constant(self) -> bool:
        """Whether they do not depend on the layers."""
        return isinstance(self._slowdowns, Known)

    @property
    def predicted(self) -> int:
        """Number of loads predicted so far."""
        return len(self._known)

    def of(self, cuts: Integers, orders: Integers) -> Floats:
        """float[N, D, R]: by candidate, pipeline and rank of the schedule.

        Args:
            cuts: int[N, S + 1], the first layer of each stage, and the number of layers.
            orders: int[N, R], per rank of the schedule the pipeline rank that takes its part.
        """
        count, ranks = orders.shape
        places = orders[:, None, :] + ranks * np.arange(self._pipelines)[None, :, None]
        if isinstance(self._slowdowns, Known):
            return np.array(self._slowdowns.by_place)[places]
        found = np.empty((count, self._pipelines, ranks))
        if not count:
            return found
        for rank, own in enumerate(self._stages):
            spans = np.concatenate([cuts[:, [stage, stage + 1]] for stage in own], axis=1)
            for pipeline in range(self._pipelines):
                found[:, pipeline, rank] = self._of_rank(places[:, pipeline, rank], spans)
        return found

    def _of_rank(self, places: Integers, spans: Integers) -> Floats:
        """float[N], for the places and the bounds of their stages."""
        key = places
        for column in spans.T:
            key = np.unique(key, return_inverse=True)[1] * (int(column.max()) + 1) + column
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        loads = [
            PlaceLoad(
                int(places[row]), tuple(zip(spans[row, ::2].tolist(), spans[row, 1::2].tolist(), strict=True))
            )
            for row in first.tolist()
        ]
        new = [load for load in loads if load not in self._known]
        if new:
            self._known.update(zip(new, map(float, self._slowdowns(new)), strict=True))
        return np.array([self._known[load] for load in loads])[inverse]
