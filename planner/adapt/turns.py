"""Whether a rank's reports come in the order of its steps. Holds state but no clock.

A report on an older step than the rank's newest, or on one far ahead, is not believed. When several in a row agree, the
rank is there after all: such as after steps that were undone, or after a first report that was nonsense.
"""

from __future__ import annotations

from statistics import median_low

AHEAD_STEPS = 1000
"""Most steps from one report of a rank to its next."""
AGREEING = 3
"""Reports in a row, each on a later step than the one before, that are believed whatever came before them."""


class Turns:
    """The newest step of each rank."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._doubted: dict[int, tuple[int, ...]] = {}
        """Rank -> the steps of its reports in a row that were not believed."""

    @property
    def step(self) -> int:
        """The newest step by most ranks; 0 before the first report."""
        return median_low(self._newest.values()) if self._newest else 0

    def refusal(self, rank: int, step: int) -> str:
        """Why a report on `step` is not believed; "" if it is."""
        if step < 0:
            return f"there is no step {step}"
        newest = self._newest.get(rank, step)
        doubted = self._doubted.pop(rank, ())
        if newest <= step <= newest + AHEAD_STEPS:
            self._newest[rank] = step
            return ""
        follows = bool(doubted) and doubted[-1] < step <= doubted[-1] + AHEAD_STEPS
        doubted = (*doubted, step) if follows else (step,)
        if len(doubted) == AGREEING:
            self._newest[rank] = step
            return ""
        self._doubted[rank] = doubted
        return f"step {step} comes after step {newest}"
