"""A random forest as arrays: what it predicts. Needs no library that fits one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.interference.dataset import Rows

LEAF = -1
"""The children of a leaf."""


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Regression trees, one after the other in each array. A node's children have higher numbers than it."""

    roots: NDArray[np.int32]
    """The node at which each tree begins."""
    left: NDArray[np.int32]
    """Child for values at most `threshold`; `LEAF` at leaves."""
    right: NDArray[np.int32]
    feature: NDArray[np.int32]
    """Column that a node tests; 0 at leaves."""
    threshold: NDArray[np.float64]
    missing_left: NDArray[np.bool_]
    """Whether a missing value goes left."""
    value: NDArray[np.float64]
    """Prediction of a leaf."""
    columns: int
    """Features of a row."""

    def __post_init__(self) -> None:
        nodes = len(self.left)
        arrays = (self.right, self.feature, self.threshold, self.missing_left, self.value)
        inner = self.left != LEAF
        numbers = np.arange(nodes)
        if (
            any(len(array) != nodes for array in arrays)
            or not len(self.roots)
            or np.any((self.roots < 0) | (self.roots >= nodes))
            or np.any(inner != (self.right != LEAF))
            or np.any(inner & ((self.left <= numbers) | (self.left >= nodes)))
            or np.any(inner & ((self.right <= numbers) | (self.right >= nodes)))
            or np.any((self.feature < 0) | (self.feature >= self.columns))
            or not np.all(np.isfinite(self.threshold))
            or not np.all(np.isfinite(self.value))
        ):
            raise ValueError("these arrays are no forest: a node has no such child, feature or value")

    @property
    def trees(self) -> int:
        return len(self.roots)

    def of_trees(self, rows: Rows) -> NDArray[np.float64]:
        """(trees, rows): what each tree predicts.

        Raises:
            ValueError: the rows have another number of features.
        """
        if rows.ndim != 2 or rows.shape[1] != self.columns:
            raise ValueError(f"rows of shape {rows.shape}: expected (any, {self.columns})")
        # Fitted with values rounded so: a value between them would go the other way.
        rounded = rows.astype(np.float32).astype(np.float64)
        node = np.repeat(self.roots[:, None], len(rows), axis=1)
        row = np.arange(len(rows))
        while np.any(inner := self.left[node] != LEAF):
            seen = rounded[row, self.feature[node]]
            goes_left = np.where(np.isnan(seen), self.missing_left[node], seen <= self.threshold[node])
            node = np.where(inner, np.where(goes_left, self.left[node], self.right[node]), node)
        return self.value[node]

    def predict(self, rows: Rows) -> NDArray[np.float64]:
        """The mean of the trees, by row."""
        return self.of_trees(rows).mean(axis=0)

    def spread(self, rows: Rows) -> NDArray[np.float64]:
        """The standard deviation of the trees, by row: how little they agree."""
        return self.of_trees(rows).std(axis=0)
