"""PipeTransformer's rule as its paper has it: all layers before the one with the smallest gradient may freeze."""

from __future__ import annotations

from dataclasses import dataclass

from workers.freezing.prefix.rule import BoundedRule, CommitSeen
from workers.protocol.frozen_prefix import FrozenPrefix


@dataclass(frozen=True, kw_only=True)
class PaperRule(BoundedRule):
    """PipeTransformer, eq. 1: `argmin` over the layers still trained of the norm of the layer's gradient in the step of
    the check. The layer with the smallest one is trained on; of equal ones the first counts."""

    def quiet(self, prefix: FrozenPrefix, seen: CommitSeen, frozen: int) -> int:
        norms = seen.norms[1:-1]
        return min(range(frozen, len(norms)), key=lambda layer: norms[layer])
