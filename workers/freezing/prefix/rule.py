"""A rule of the frozen prefix: from what a commit tells of all layers to the prefix of the next step. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.protocol.frozen_prefix import FrozenPrefix

ROUNDING = 1e-9
"""A count that lies below a whole number by no more than this is that number."""


@dataclass(frozen=True, kw_only=True)
class CommitSeen:
    """Facts that the commit of a step told."""

    step: int
    began: float
    """Steps before it, and up to it: in steps of the batch that the job begins with, which may have grown."""
    along: float
    norms: Sequence[float]
    """Per layer of the model, the norm of its gradient, of the step's mean loss; 0 below the prefix."""
    skipped: bool = False
    """Whether the step changed no weight."""
    stable: int = 0
    """Layers, from the input up, that AutoFreeze found stable at this commit."""
    rate: float = 1.0
    """Share of the full learning rate in the next step; 1 while it warms up."""
    validations: Sequence[tuple[int, float]] = ()
    """(step, loss) of the job's validations before this step, in order."""


class PrefixRule(ABC):
    """A rule by which the number of frozen layers changes."""

    @abstractmethod
    def first(self) -> FrozenPrefix:
        """The prefix of step 1."""

    @abstractmethod
    def after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        """The prefix of the step after `seen`, which followed `prefix`."""


@dataclass(frozen=True, kw_only=True)
class BoundedRule(PrefixRule):
    """A rule that looks at gradients every so many steps, and freezes at most a share of what is still trained.

    It counts the layers between the model's first and its last: the first freezes with its neighbour, the last never.
    PipeTransformer, eq. 1: at check T, `L_T = min(L_{T-1} + alpha (L - L_{T-1}), quiet)`, where `quiet` layers may
    freeze by their gradients. The count is kept as a real number, and only what is applied is rounded down: with whole
    numbers it would stall. At least one of the layers stays.
    """

    layers: int
    """Number of layers of the model."""
    alpha: float
    warm_up: int
    """Steps before the first interval between checks; like the next, of the batch that the job begins with."""
    check_every: int
    """Steps from check to check."""

    def first(self) -> FrozenPrefix:
        return FrozenPrefix()

    def after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        before, since = max(0.0, seen.began - self.warm_up), seen.along - self.warm_up
        prefix = self.noted(prefix, seen) if since > 0 else prefix
        if since <= 0 or before // self.check_every == since // self.check_every:
            return prefix
        counted = self.layers - 2
        bound = prefix.bound
        frozen = math.floor(bound + ROUNDING)
        quiet = frozen if seen.skipped else self.quiet(prefix, seen, frozen)
        grown = min(bound + self.alpha * (counted - bound), quiet, counted - 1)
        bound = max(bound, grown)
        frozen = math.floor(bound + ROUNDING)
        return replace(self.begun_anew(prefix), bound=float(bound), layers=frozen + 1 if frozen else 0)

    @abstractmethod
    def quiet(self, prefix: FrozenPrefix, seen: CommitSeen, frozen: int) -> int:
        """Number of layers between first and last that may be frozen by their gradients; the first `frozen` are."""

    def noted(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        """`prefix` with what the rule remembers of `seen`."""
        return prefix

    def begun_anew(self, prefix: FrozenPrefix) -> FrozenPrefix:
        """`prefix` after a check."""
        return prefix
