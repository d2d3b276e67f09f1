"""Numbers as differences: where they are regular these repeat, and take hardly any bytes once compressed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise


def differences(values: Iterable[int]) -> list[int]:
    """Each value less the one before it; the first as it is."""
    return [after - before for before, after in pairwise((0, *values))]


def from_differences(steps: Iterable[int]) -> tuple[int, ...]:
    """The values with these differences."""
    return tuple(accumulate(steps))
