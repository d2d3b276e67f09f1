"""A curve the size of a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 160, 36
_EDGE = 3


@dataclass(frozen=True)
class Sparkline:
    """A curve."""

    points: str
    """`points` of an SVG polyline."""
    words: str
    """The same for readers who cannot see it."""
    width: int = WIDTH
    height: int = HEIGHT


def sparkline(losses: Sequence[float]) -> Sparkline | None:
    """The curve of `losses`; None for fewer than two."""
    if len(losses) < 2:
        return None
    low, high = min(losses), max(losses)
    span = high - low or 1.0
    points = " ".join(
        f"{_EDGE + number * (WIDTH - 2 * _EDGE) / (len(losses) - 1):.1f},"
        f"{HEIGHT - _EDGE - (loss - low) / span * (HEIGHT - 2 * _EDGE):.1f}"
        for number, loss in enumerate(losses)
    )
    return Sparkline(points, f"loss from {losses[0]:.4f} to {losses[-1]:.4f}, lowest {low:.4f}")
