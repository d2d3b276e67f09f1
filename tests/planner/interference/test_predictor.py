"""Slowdowns of candidate stages on devices, by a forest of known arrays, and the features of a stage from a profile."""

from __future__ import annotations

import numpy as np
import pytest
from small_profile import layer, profile

from planner.adapt.forest_slowdowns import stage_features
from planner.features import NAMES, STAGE
from planner.interference.forest import Forest
from planner.interference.predictor import Predictor


def stump(name: str, threshold: float) -> Forest:
    """Predicts 1 up to `threshold`, 2 above it, and 1 where the value is missing."""
    column = NAMES.index(name)
    return Forest(
        roots=np.array([0], dtype=np.int32),
        left=np.array([1, -1, -1], dtype=np.int32),
        right=np.array([2, -1, -1], dtype=np.int32),
        feature=np.array([column, 0, 0], dtype=np.int32),
        threshold=np.array([threshold, 0.0, 0.0]),
        missing_left=np.array([True, False, False]),
        value=np.array([0.0, 1.0, 2.0]),
        columns=len(NAMES),
    )


def test_each_stage_is_predicted_on_each_device() -> None:
    stages = [{"work": 0.1}, {"work": 0.2}, {"work": 0.3}]
    devices = [{"cpu_others": 0.0}, {"cpu_others": 1.5, "measured_ratio": 1.5}]
    of_devices = Predictor(stump("cpu_others", 1.0)).slowdowns(stages, devices)
    assert of_devices.tolist() == [[1.0, 3.0]] * 3
    of_stages = Predictor(stump("work", 0.15)).slowdowns(stages, devices)
    assert of_stages.tolist() == [[1.0, 1.5], [2.0, 3.0], [2.0, 3.0]]
    assert Predictor(stump("work", 0.15)).slowdowns([], devices).shape == (0, 2)


def test_what_is_no_number_is_missing() -> None:
    predictor = Predictor(stump("cpu_others", 1.0))
    devices = [{"cpu_others": value} for value in (np.inf, -np.inf, np.nan, 1e300, 1.5)]
    assert predictor.slowdowns([{}], devices).tolist() == [[1.0, 1.0, 1.0, 1.0, 2.0]]


def test_a_measured_ratio_that_is_none_counts_as_one() -> None:
    predictor = Predictor(stump("cpu_others", 1.0))
    devices = [{"cpu_others": 1.5, "measured_ratio": ratio} for ratio in (np.inf, np.nan, -1.0, 0.0, 1e300)]
    assert predictor.slowdowns([{}], devices).tolist() == [[2.0] * 5]


def test_names_that_are_no_features_or_of_both_are_refused() -> None:
    predictor = Predictor(stump("cpu_others", 1.0))
    with pytest.raises(ValueError, match="no such features: weather"):
        predictor.slowdowns([{"weather": 1.0}], [{}])
    with pytest.raises(ValueError, match="not of both: work"):
        predictor.slowdowns([{"work": 1.0}], [{"work": 1.0}])
    with pytest.raises(ValueError, match="expected"):
        predictor.predict(np.zeros((2, 3)))


def test_a_rank_has_the_features_of_its_stages() -> None:
    model = profile(layer("a"), layer("b"), layer("c"), layer("d")).model
    # Forward 1 s, backward 6 s, 10 parameters, 4 bytes on and 2 back per layer.
    assert stage_features(model, [range(1, 3)]) == {
        "layers": 2.0,
        "work": 14.0,
        "forward_share": 1 / 7,
        "parameters": 20.0,
        "messages": 6.0,
    }
    assert stage_features(model, [range(0, 1), range(3, 4)])["messages"] == 4 + 2
    assert set(stage_features(model, [range(4)])) < {feature.name for feature in STAGE}
