"""Samples in fixed parts, of which each replica draws from one alone. Pure.

PipeTransformer's fixed subset per machine (sections 3.3 and 3.4: a machine keeps the activations of its own samples),
without depending on machines. Each part is visited in an order of its own, each of its samples once before any twice.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache

from planner.course import Course
from workers.data.mixture import Order


@dataclass(frozen=True)
class Buckets:
    """Parts of a job's samples, numbered in order; replica r draws from part r modulo their number."""

    samples: int
    """Samples of all parts together."""
    parts: int
    """At most `samples`, and a divisor of the replicas of every leg: each step draws as much from each part."""
    course: Course

    def __post_init__(self) -> None:
        assert 1 <= self.parts <= self.samples
        assert not any(leg.replicas % self.parts for leg in self.course.legs)

    def part(self, position: int) -> tuple[int, int]:
        """(part, samples that were drawn from it before) at `position` of the stream of all replicas."""
        begun, replica, offset, of_replica = self.course.turn(position)
        turn, part = divmod(replica, self.parts)
        return part, begun // self.parts + turn * of_replica + offset

    def place(self, seed: int, position: int, order: Order) -> tuple[int, int]:
        """(pass, sample) at `position` of the stream: how often its part has come round, and the sample.

        Args:
            order: of the samples within a pass.
        """
        part, before = self.part(position)
        first, stop = (number * self.samples // self.parts for number in (part, part + 1))
        passes, offset = divmod(before, stop - first)
        return passes, first + order(_key(seed, part), passes, offset, stop - first)


@lru_cache(maxsize=1024)
def _key(seed: int, part: int) -> int:
    """Seed of the order in which a part is visited: parts of one size have orders of their own."""
    digest = hashlib.blake2b(json.dumps(["bucket", seed, part]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
