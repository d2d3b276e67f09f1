"""PipeTransformer's rule as its authors' published code has it: layers whose gradients no longer change may freeze."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workers.freezing.prefix.rule import BoundedRule, CommitSeen
from workers.protocol.frozen_prefix import FrozenPrefix

PERCENTILE = 70


@dataclass(frozen=True, kw_only=True)
class AuthorsRule(BoundedRule):
    """A layer's gradient, added up between two checks, is compared with that of the interval before. Layers may freeze
    up to the first, of those still trained, whose relative change is above the 70th percentile of their changes; at the
    first check none may.

    Where the authors add up absolute values, this adds up the norms of the steps' gradients: commits carry those.
    """

    def noted(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        if seen.skipped:
            return prefix
        before = prefix.sums or (0.0,) * len(seen.norms)
        return replace(prefix, sums=tuple(map(sum, zip(before, seen.norms, strict=True))))

    def begun_anew(self, prefix: FrozenPrefix) -> FrozenPrefix:
        return replace(prefix, sums=(), sums_before=prefix.sums)

    def quiet(self, prefix: FrozenPrefix, seen: CommitSeen, frozen: int) -> int:
        now, before = prefix.sums[1:-1], prefix.sums_before[1:-1]
        if not now or not before:
            return frozen
        changes = [_change(*pair) for pair in zip(before[frozen:], now[frozen:], strict=True)]
        most = sorted(changes)[math.ceil(PERCENTILE / 100 * len(changes)) - 1]
        return frozen + next((number for number, change in enumerate(changes) if change > most), len(changes))


def _change(before: float, now: float) -> float:
    return abs(now - before) / before if before else math.inf
