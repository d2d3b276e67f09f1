"""State that a job carries from commit to commit besides its layers. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.course import Leg
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.loss_scale import LossScale


@dataclass(frozen=True, kw_only=True)
class Carried:
    """State that the next step follows: the same on every rank, because it follows from the commits."""

    loss_scale: LossScale | None = None
    """The loss scale, where the precision needs one."""
    prefix: FrozenPrefix = field(default_factory=FrozenPrefix)
    """The layers that it freezes."""
    legs: tuple[Leg, ...] = ()
    """The legs of the batch's course that have begun, or begin with it, after the one that the spec says."""
