"""Writes a benchmark's figure with its target, and marks a figure that misses it."""

from __future__ import annotations

from collections.abc import Sequence


def under(text: str, value: float, limit: float) -> str:
    """`text`, which tells `value`, with the target: less than `limit`, in the unit of `text`."""
    return _beside(text, f"under {limit:,g}", value < limit)


def at_most(text: str, value: float, limit: float) -> str:
    """`text`, which tells `value`, with the target: no more than `limit`, in the unit of `text`."""
    return _beside(text, f"at most {limit:,g}", value <= limit)


def at_least(text: str, value: float, limit: float) -> str:
    """`text`, which tells `value`, with the target: no less than `limit`, in the unit of `text`."""
    return _beside(text, f"at least {limit:,g}", value >= limit)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of `values` does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _beside(text: str, target: str, met: bool) -> str:
    return f"{text} (asked: {target}){'' if met else ' MISSED'}"
