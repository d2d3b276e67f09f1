"""The interference model carries a measured slowdown over to other layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import small_profile
from numpy.typing import NDArray

from planner.adapt.forest_slowdowns import BELIEVED, MOST, ForestSlowdowns
from planner.features import NAMES
from planner.repartition.slowdowns import PlaceLoad

MODEL = small_profile.profile(*(small_profile.layer(f"layer{number}") for number in range(8))).model


class PerLayer:
    """Predicts a slowdown of 1 plus `slope` for each layer and each core that others take."""

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self.rows = 0

    def predict(self, rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        self.rows += len(rows)
        table = np.array(rows)
        return 1 + self._slope * table[:, NAMES.index("layers")] * table[:, NAMES.index("cpu_others")]


def slowdowns(slope: float) -> ForestSlowdowns:
    """Two places hold four layers each; on the host of the second others take a core, and it is measured 3 times as
    slow as the profile says."""
    predictor: Any = PerLayer(slope)
    sampled = ({"cpu_others": 0.0}, {"cpu_others": 1.0})
    return ForestSlowdowns(predictor, MODEL, (1.0, 3.0), (((0, 4),), ((4, 8),)), sampled)


def test_what_is_held_is_as_slow_as_measured_and_half_of_what_the_model_says_of_other_layers_counts() -> None:
    found = slowdowns(0.5)(
        [PlaceLoad(0, ((0, 4),)), PlaceLoad(1, ((4, 8),)), PlaceLoad(1, ((6, 8),)), PlaceLoad(0, ((0, 6),))]
    )
    assert found == [1.0, 3.0, pytest.approx(3.0 * (2 / 3) ** 0.5), 1.0]


def test_the_model_is_not_believed_beyond_a_bound() -> None:
    assert slowdowns(100.0)([PlaceLoad(1, ((7, 8),))]) == [pytest.approx(3.0 / MOST**BELIEVED)]


def test_without_a_sample_the_measured_slowdown_stands_for_all_layers() -> None:
    predictor: Any = PerLayer(0.5)
    known = ForestSlowdowns(predictor, MODEL, (2.5,), (((0, 4),),), ({},))
    assert known([PlaceLoad(0, ((0, 1),))]) == [2.5]
    assert predictor.rows == 0
