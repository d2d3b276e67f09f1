"""Tables that training mixes by weights: which of them each sample is of, and which sample of it. Pure.

Tables take turns as evenly as their weights allow: each has its share of any stretch of the stream, give or take a few
samples. Each is visited in an order of its own, each of its samples once before any twice, however often it comes
round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm

_PHASES = 1 << 32
"""Number of places within a period where a table may begin."""
Order = Callable[[int, int, int, int], int]
"""Seed, pass, place and number of samples -> the sample at that place."""


@dataclass(frozen=True)
class Mixture:
    """Tables by number of samples and weight. Their samples are numbered one table after the other."""

    samples: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.weights)
        assert all(number > 0 for number in (*self.samples, *self.weights))

    @cached_property
    def _shares(self) -> tuple[int, ...]:
        """The weights as integers, exactly as they are written in decimals."""
        exact = [Fraction(repr(float(weight))) for weight in self.weights]
        common = lcm(*(each.denominator for each in exact))
        return tuple(int(each * common) for each in exact)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.samples))

    def table(self, seed: int, position: int) -> tuple[int, int]:
        """(number of the table, samples that the stream has had of it before) at `position` of the stream.

        A table with the share w of the stream has sample n + 1 where w * position passes n, but for a phase that the
        seed draws; the other tables share out what it leaves, in the same way.
        """
        rest, left = position, sum(self._shares)
        last = len(self._shares) - 1
        for number, share in enumerate(self._shares[:last]):
            phase, period = _phase(seed, number) * left, left * _PHASES
            before = (rest * share * _PHASES + phase) // period
            if ((rest + 1) * share * _PHASES + phase) // period > before:
                return number, before
            rest, left = rest - before, left - share
        return last, rest

    def place(self, seed: int, position: int, order: Order) -> tuple[int, int]:
        """(pass, sample) at `position` of the stream: how often its table has come round, and the sample.

        Args:
            order: of the samples within a pass.
        """
        number, before = self.table(seed, position)
        passes, offset = divmod(before, self.samples[number])
        return passes, self._firsts[number] + order(_key(seed, number), passes, offset, self.samples[number])


@lru_cache(maxsize=1024)
def _key(seed: int, number: int) -> int:
    """Seed of the order in which a table is visited: tables of one size have orders of their own."""
    digest = hashlib.blake2b(json.dumps(["mixture", seed, number]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _phase(seed: int, number: int) -> int:
    return _key(seed, number) % _PHASES
