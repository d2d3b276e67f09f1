"""Fits models of slowdowns to measured windows and judges them by neighbours that they have not seen.

A random forest of 128 trees (DynPipe, section V-A); linear regression, a small neural network and the last measured
ratio stand beside it, for comparison. All predict the ratio over the last measured one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.features import NAMES
from planner.interference.dataset import ALONE, Rows, Windows, check, measured_ratios
from planner.interference.forest import LEAF, Forest
from planner.interference.judgement import CANDIDATES, Judgement, Score

TREES = 128
SMALLEST_LEAF = 3
"""Windows at a leaf: fewer would follow single windows' noise."""


class RatioModel(Protocol):
    """Predicts, from rows, ratios over the last measured ones."""

    def predict(self, rows: Rows) -> NDArray[np.float64]: ...


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A forest that was fitted to all windows, and how it was judged."""

    forest: Forest
    judgement: Judgement


def fit(windows: Windows, *, warnings: Sequence[str] = (), seed: int = 0) -> Fit:
    """Fit a forest to `windows`, and judge it and its rivals by leaving out one kind of neighbour after the other.

    Windows alone are always among those that are fitted to: every machine has them.

    Args:
        warnings: what made the windows less trustworthy, in words.

    Raises:
        DatasetError: nothing can be fitted to these windows.
    """
    check(windows)
    regressor = _regressor(windows, seed)
    forest = _arrays(regressor)
    predicted = {name: left_out(windows, fitter, seed) for name, fitter in FITTERS.items()}
    return Fit(
        forest=forest,
        judgement=Judgement(
            scores=tuple(_score(name, windows, values) for name, values in predicted.items()),
            importances=_importances(regressor),
            calibration=_calibration(windows, predicted["forest"]),
            latency_s=_latency(forest, windows),
            windows=len(windows),
            warnings=tuple(warnings),
        ),
    )


def left_out(
    windows: Windows, fitter: Callable[[Windows, int], RatioModel], seed: int
) -> NDArray[np.float64]:
    """Predicted ratios of the windows beside neighbours, each by a model that has not seen its kind; NaN alone."""
    predicted = np.full(len(windows), np.nan)
    kinds = np.array(windows.kinds)
    for kind in windows.neighbours:
        model = fitter(windows.only(kinds != kind), seed)
        rows = windows.rows[kinds == kind]
        predicted[kinds == kind] = measured_ratios(rows) * model.predict(rows)
    return predicted


def _score(name: str, windows: Windows, predicted: NDArray[np.float64]) -> Score:
    kinds = np.array(windows.kinds)
    beside = kinds != ALONE
    measured = windows.ratios[beside]
    left = float(np.sum((measured - predicted[beside]) ** 2))
    total = float(np.sum((measured - measured.mean()) ** 2))
    errors = np.abs(predicted / windows.ratios - 1)
    return Score(
        model=name,
        r2=1 - left / total if total else 0.0,
        median_error=float(np.median(errors[beside])),
        by_kind=tuple((kind, float(np.median(errors[kinds == kind]))) for kind in windows.neighbours),
    )


def _calibration(windows: Windows, predicted: NDArray[np.float64]) -> tuple[tuple[float, float, int], ...]:
    beside = np.flatnonzero(np.array(windows.kinds) != ALONE)
    order = beside[np.argsort(predicted[beside], kind="stable")]
    return tuple(
        (float(predicted[part].mean()), float(windows.ratios[part].mean()), len(part))
        for part in np.array_split(order, 5)
        if len(part)
    )


def _latency(forest: Forest, windows: Windows) -> float:
    rows = windows.rows[np.arange(CANDIDATES) % len(windows)]
    times = []
    for _ in range(5):
        begun_s = time.perf_counter()
        forest.predict(rows)
        times.append(time.perf_counter() - begun_s)
    return float(np.median(times))


def _regressor(windows: Windows, seed: int) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    regressor = RandomForestRegressor(
        TREES, min_samples_leaf=SMALLEST_LEAF, max_features=1 / 3, random_state=seed
    )
    return regressor.fit(windows.rows, _targets(windows))


def _targets(windows: Windows) -> NDArray[np.float64]:
    return windows.ratios / measured_ratios(windows.rows)


def _arrays(regressor: Any) -> Forest:
    trees = [estimator.tree_ for estimator in regressor.estimators_]
    begins = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]
    left, right = (
        [
            np.where(tree.children_left < 0, LEAF, children + begin)
            for tree, children, begin in zip(trees, side, begins, strict=True)
        ]
        for side in ([tree.children_left for tree in trees], [tree.children_right for tree in trees])
    )
    inner = np.concatenate(left) != LEAF
    features = np.concatenate([tree.feature for tree in trees])
    thresholds = np.concatenate([tree.threshold for tree in trees])
    return Forest(
        roots=begins.astype(np.int32),
        left=np.concatenate(left).astype(np.int32),
        right=np.concatenate(right).astype(np.int32),
        feature=np.where(inner, features, 0).astype(np.int32),
        # A split of present from missing values alone has an infinite threshold.
        threshold=np.where(inner, np.nan_to_num(thresholds, posinf=np.finfo(np.float64).max), 0.0),
        missing_left=np.concatenate([tree.missing_go_to_left for tree in trees]).astype(bool) & inner,
        value=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        columns=len(NAMES),
    )


def _importances(regressor: Any) -> tuple[tuple[str, float], ...]:
    found = zip(NAMES, regressor.feature_importances_, strict=True)
    return tuple(
        sorted(((name, float(share)) for name, share in found if share > 0), key=lambda one: -one[1])
    )


def _linear(windows: Windows, seed: int) -> RatioModel:
    from sklearn.linear_model import Ridge

    return _scaled(Ridge(1.0), windows)


def _network(windows: Windows, seed: int) -> RatioModel:
    from sklearn.neural_network import MLPRegressor

    return _scaled(
        MLPRegressor(hidden_layer_sizes=(32, 16), max_iter=2000, early_stopping=True, random_state=seed),
        windows,
    )


def _scaled(model: Any, windows: Windows) -> Any:
    """`model` on values of mean 0 and deviation 1, with the median in place of those that are missing.

    What lies beyond the values that it is fitted to counts as the nearest of them: a neighbour that was not seen may
    write ten times as much to the disk, and a line has no bound.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    imputer = SimpleImputer(strategy="median", keep_empty_features=True)
    fitted = make_pipeline(imputer, MinMaxScaler(clip=True), StandardScaler(), model)
    return fitted.fit(windows.rows, _targets(windows))


class _Unchanged:
    """Predicts the last measured ratio, for every stage."""

    def predict(self, rows: Rows) -> NDArray[np.float64]:
        return np.ones(len(rows))


FITTERS: dict[str, Callable[[Windows, int], RatioModel]] = {
    "forest": lambda windows, seed: _arrays(_regressor(windows, seed)),
    "linear": _linear,
    "network": _network,
    "measured": lambda windows, seed: _Unchanged(),
}
"""Name -> what fits it; the forest, and its rivals."""
