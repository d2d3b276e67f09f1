"""Predicts slowdowns of stages that ranks may hold, on devices as they are now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.features import NAMES, row
from planner.interference.dataset import Rows, measured_ratios
from planner.interference.forest import Forest


class Predictor:
    """Predicts with a fitted forest. A slowdown is the time of a stage over its time on an undisturbed device: the one
    that was measured last, times what the forest predicts of the other stage's."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    def predict(self, rows: Rows) -> NDArray[np.float64]:
        """The slowdown of each row.

        Args:
            rows: (any, features) in the order of `planner.features.FEATURES`. What is not finite is missing.

        Raises:
            ValueError: the rows have another number of features.
        """
        with np.errstate(over="ignore"):
            finite = np.isfinite(rows.astype(np.float32))
        kept = np.where(finite, rows, np.nan)
        return self._forest.predict(kept) * measured_ratios(kept)

    def slowdowns(
        self, stages: Sequence[Mapping[str, float]], devices: Sequence[Mapping[str, float]]
    ) -> NDArray[np.float64]:
        """(stages, devices): the slowdown of each stage on each device.

        Args:
            stages: what `stage_features` says of what a rank may hold.
            devices: what a rank sampled, and its `measured_ratio` where it is known.

        Raises:
            ValueError: a name is none of a feature, or belongs to both.
        """
        if both := {name for one in stages for name in one} & {name for one in devices for name in one}:
            raise ValueError(f"of the stage or of the device, not of both: {', '.join(sorted(both))}")
        of_stages = np.array([row(one) for one in stages]).reshape(-1, 1, len(NAMES))
        of_devices = np.array([row(one) for one in devices]).reshape(1, -1, len(NAMES))
        rows = np.where(np.isnan(of_stages), of_devices, of_stages)
        return self.predict(rows.reshape(-1, len(NAMES))).reshape(len(stages), len(devices))
