"""Scores and energies of freezing, as commit records carry them and the commit adds them up.

Not here: how they are found (`workers/freezing/stability.py`, `workers/freezing/energy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Energy = tuple[float, float]
"""The energy of a gradient, and the part of it that a step lets through."""
Moves = tuple[float, float]
"""The squared norms of a parameter's updates in the interval before the last one, and in the last one."""

UNKNOWN = math.inf
"""The score of a layer of which too little is known."""


def total_of(energies: Iterable[Energy]) -> Energy:
    """The energy of what has these, in this order."""
    total = through = 0.0
    for energy, part in energies:
        total += energy
        through += part
    return total, through


def score_of(moves: Iterable[Moves]) -> float:
    """AutoFreeze's score of a layer that is not stable: how much the norm of its updates has changed from one interval
    to the next, as a part of what it was. Eq. 1 of TimelyFreeze.

    Args:
        moves: of its parameters, in name order.
    """
    squares = squares_before = 0.0
    for before, now in moves:
        squares_before += before
        squares += now
    moved, moved_before = math.sqrt(squares), math.sqrt(squares_before)
    return abs(moved_before - moved) / moved_before if moved_before > 0.0 else UNKNOWN
