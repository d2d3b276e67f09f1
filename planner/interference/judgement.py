"""Quality of a model of interference, on neighbours that it was not fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict

CANDIDATES = 100
"""Rows of which the prediction is timed."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy of a model on the windows beside neighbours that were left out when it was fitted."""

    model: str
    r2: float
    """Share of the ratios' variance that it explains."""
    median_error: float
    """Median of |predicted / measured - 1|."""
    by_kind: tuple[tuple[str, float], ...]
    """(neighbour that was left out, median error on its windows)."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Quality of a fitted forest and its rivals."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scores: tuple[Score, ...]
    """Scores of the forest, linear regression, the network and the last measured ratio, in this order."""
    importances: tuple[tuple[str, float], ...]
    """(feature, share of the variance that its splits remove), the largest first; features without any are left out."""
    calibration: tuple[tuple[float, float, int], ...]
    """(mean predicted ratio, mean measured ratio, windows), by fifths of the predictions for neighbours left out."""
    latency_s: float
    """To predict `CANDIDATES` rows, median of several times."""
    windows: int
    warnings: tuple[str, ...] = ()
    """Reasons to trust the windows less, in words."""

    @property
    def forest(self) -> Score:
        """The forest's own score."""
        return self.scores[0]
