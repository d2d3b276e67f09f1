"""The prefix that a spec says, step by step: freezing by hand, and gradual thawing."""

from __future__ import annotations

from dataclasses import dataclass

from workers.freezing.prefix.rule import CommitSeen, PrefixRule
from workers.protocol.frozen_prefix import FrozenPrefix


@dataclass(frozen=True)
class ByHand(PrefixRule):
    """`freeze.prefix`, or `freeze.schedule`: (step, layers) pairs in order of steps."""

    schedule: tuple[tuple[int, int], ...]

    def first(self) -> FrozenPrefix:
        return self._at(1)

    def after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        return self._at(seen.step + 1)

    def _at(self, step: int) -> FrozenPrefix:
        begun = [layers for first, layers in self.schedule if first <= step]
        return FrozenPrefix(layers=begun[-1] if begun else 0)
