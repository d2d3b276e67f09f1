"""The prefix of layers that AutoFreeze has found stable: they stay so."""

from __future__ import annotations

from dataclasses import dataclass

from workers.freezing.prefix.rule import CommitSeen, PrefixRule
from workers.protocol.frozen_prefix import FrozenPrefix


@dataclass(frozen=True)
class StablePrefix(PrefixRule):
    """AutoFreeze: eq. 1 of TimelyFreeze decides what is stable, in `workers.freezing.stability`."""

    layers: int
    """Number of layers of the model."""

    def first(self) -> FrozenPrefix:
        return FrozenPrefix()

    def after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        return FrozenPrefix(layers=min(max(prefix.layers, seen.stable), self.layers - 1))
