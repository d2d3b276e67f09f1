"""When the prefix is given up for good: all layers are trained to the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workers.freezing.prefix.rule import CommitSeen, PrefixRule
from workers.protocol.frozen_prefix import FrozenPrefix

LOW_RATE = 0.1
"""Share of the full learning rate at which `rate` thaws."""


@dataclass(frozen=True, kw_only=True)
class Thawing(PrefixRule):
    """Another rule, until validation stops improving or the learning rate has fallen to a tenth."""

    rule: PrefixRule
    by: Literal["plateau", "rate"]

    def first(self) -> FrozenPrefix:
        prefix = self.rule.first()
        return replace(prefix, since=1) if prefix.layers else prefix

    def after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        if prefix.thawed:
            return prefix
        if prefix.layers and self._due(prefix, seen):
            return FrozenPrefix(since=prefix.since, thawed=True)
        found = replace(self.rule.after(prefix, seen), since=prefix.since)
        return replace(found, since=seen.step + 1) if found.layers and not found.since else found

    def _due(self, prefix: FrozenPrefix, seen: CommitSeen) -> bool:
        if self.by == "rate":
            return seen.rate <= LOW_RATE
        return stopped_improving(seen.validations, prefix.since)


def stopped_improving(validations: Sequence[tuple[int, float]], since: int) -> bool:
    """Whether a validation of step `since` or later was no better than the best one before it.

    Args:
        validations: (step, loss), in order.
    """
    best = math.inf
    for step, loss in validations:
        if step >= since and not loss < best and math.isfinite(best):
            return True
        best = min(best, loss) if math.isfinite(loss) else best
    return False
