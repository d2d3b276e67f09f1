"""When and how much is frozen: TimelyFreeze's phases and a table of ratios. A leaf: values, no solver, no draw.

Ratios are shares of measured weight-gradient time. A table holds one per (layer, microbatch of a replica), so that
it means the same whatever the partition.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property

Ratios = tuple[tuple[float, ...], ...]
"""`ratios[layer][microbatch]`, each in [0, 1]."""
Weights = tuple[tuple[tuple[str, int], ...], ...]
"""`weights[layer]`: (matrix, nanoseconds that its gradient of one microbatch was measured to take)."""


class Phase(StrEnum):
    """What a step is for (TimelyFreeze, section 3)."""

    WARM_UP = "warm_up"
    """t <= T_w: nothing is frozen, nothing recorded."""
    UPPER = "upper"
    """T_w < t <= (T_w + T_m) / 2: nothing is frozen; the longest times are recorded."""
    LOWER = "lower"
    """(T_w + T_m) / 2 < t <= T_m: everything is frozen; the shortest times are recorded."""
    RAMP = "ramp"
    """T_m < t <= T_f: ratios grow (eq. 9)."""
    STABLE = "stable"
    """t > T_f."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The last step of warm-up, monitoring and progressive freezing: T_w, T_m, T_f. Step 1 is a job's first.

    Raises:
        ValueError: they are out of order.
    """

    warm_up: int
    monitoring: int
    ramp: int

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < self.monitoring <= self.ramp or self.monitoring - self.warm_up < 2:
            raise ValueError(
                f"phases must come in order, 0 <= warm_up < monitoring <= ramp, with two steps of monitoring at"
                f" least; got warm_up = {self.warm_up}, monitoring = {self.monitoring}, ramp = {self.ramp}"
            )

    @property
    def middle(self) -> int:
        """Last step of the upper-bound half. Algorithm 1 has T_m / 2; section 3.1 means the phase's own middle."""
        return (self.warm_up + self.monitoring) // 2

    def of(self, step: int) -> Phase:
        """The phase of `step`."""
        if step <= self.warm_up:
            return Phase.WARM_UP
        if step <= self.middle:
            return Phase.UPPER
        if step <= self.monitoring:
            return Phase.LOWER
        return Phase.RAMP if step <= self.ramp else Phase.STABLE

    def share(self, step: int) -> float:
        """The share of a ratio that is applied at `step` > T_m: AFR / r of eq. 9, in (0, 1]."""
        if self.ramp == self.monitoring:
            return 1.0
        return min(1.0, (step - self.monitoring) / (self.ramp - self.monitoring))


@dataclass(frozen=True, kw_only=True)
class FreezePlan:
    """Expected freeze ratios, proposed by the planner and taken up by all ranks at one commit."""

    epoch: int
    """Incarnation of the controller that issued it; with `version` it orders plans."""
    version: int
    ratios: Ratios
    stages: tuple[tuple[int, int], ...] = ()
    """Layer ranges [first, stop) whose budgets were solved for. A hybrid method spreads each over its layers, by how
    settled they are (Algorithm 2). Empty: each layer has a budget of its own."""
    weights: Weights = ()
    """What ratios are shares of: masks are told in it, and hybrids spread budgets by it. Whole numbers, so that a log
    brings them back to the bit. Empty where nothing was measured: the matrices' scalars stand for their time."""
    start: int | None = None
    """The first step that follows it; None until the commit that takes it up."""

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of all but `start`: what ranks compare before they take it up, at every commit."""
        return hashlib.sha256(replace(self, start=None).to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)
