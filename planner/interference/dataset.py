"""Windows of a stage that was measured alone and beside neighbours: what surrounded it, and how much longer it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.features import NAMES, VERSION

ALONE = "alone"
"""The kind of a window without a neighbour."""

Rows = NDArray[np.float64]
"""Windows by features, in the order of `planner.features.FEATURES`; NaN where missing."""


class DatasetError(ValueError):
    """Nothing can be fitted to these windows; says why."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Measured windows, all of one machine."""

    rows: Rows
    """(windows, features)."""
    ratios: NDArray[np.float64]
    """Time of the stage in each window over its median time alone."""
    kinds: tuple[str, ...]
    """The neighbour of each window, such as `memory`; `alone` without one."""
    levels: tuple[str, ...]
    """Intensity and place of the neighbour, such as `light on the same core`; empty without one."""
    version: int = VERSION
    """Version of the features."""

    def __post_init__(self) -> None:
        count = len(self.ratios)
        if self.rows.shape != (count, len(NAMES)) or len(self.kinds) != count or len(self.levels) != count:
            raise DatasetError(
                f"{self.rows.shape} values, {count} ratios, {len(self.kinds)} kinds and {len(self.levels)} levels:"
                f" expected one ratio, kind and level per window, and {len(NAMES)} values"
            )

    def __len__(self) -> int:
        return len(self.ratios)

    @property
    def neighbours(self) -> tuple[str, ...]:
        """The kinds of neighbours, sorted, without `alone`."""
        return tuple(sorted(set(self.kinds) - {ALONE}))

    def only(self, chosen: Sequence[bool] | NDArray[np.bool_]) -> Windows:
        """The windows for which `chosen` is true."""
        mask = np.asarray(chosen, dtype=bool)
        return Windows(
            rows=self.rows[mask],
            ratios=self.ratios[mask],
            kinds=tuple(kind for kind, keep in zip(self.kinds, mask, strict=True) if keep),
            levels=tuple(level for level, keep in zip(self.levels, mask, strict=True) if keep),
            version=self.version,
        )


def measured_ratios(rows: Rows) -> NDArray[np.float64]:
    """By row, the slowdown that was measured last in these surroundings; 1 where it is missing.

    Models predict the ratio over this one: a device's slowdown changes less from stage to stage than from neighbour to
    neighbour, and no tree can predict a ratio beyond those that it was fitted to.
    """
    measured = rows[:, NAMES.index("measured_ratio")]
    return np.where(np.isfinite(measured) & (measured > 0), measured, 1.0)


def check(windows: Windows) -> None:
    """Check that a model can be fitted and judged.

    Raises:
        DatasetError: the features are of another version, a ratio is no factor, or fewer than two kinds of neighbours
            were measured, so that none can be left out.
    """
    if windows.version != VERSION:
        raise DatasetError(
            f"the windows have features of version {windows.version}, this program those of {VERSION}: measure others"
            " with `freshet interference collect`"
        )
    if len(windows) == 0:
        raise DatasetError("there are no windows: collect some first")
    if not all(math.isfinite(ratio) and ratio > 0 for ratio in windows.ratios):
        raise DatasetError(
            "a window's ratio is not a number above 0: measure others with `freshet interference collect`"
        )
    if len(windows.neighbours) < 2:
        there = ", ".join(windows.neighbours) or "none"
        raise DatasetError(
            f"windows beside two kinds of neighbours are needed, one to fit and one to judge by; there: {there};"
            " measure all with `freshet interference collect`"
        )
