"""Reports of ranks on their work while they train, for the planner. A leaf: values without logic."""

from __future__ import annotations

from dataclasses import dataclass

from planner.features import FeatureSample


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One kind of action of one stage in one step."""

    kind: str
    """Value of a `planner.ir.ActionKind`, such as `F`."""
    stage: int
    seconds: float
    """Sum over its microbatches, without waiting for inputs."""
    count: int
    """Microbatches."""


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """One rank's measurement of its link to another one."""

    target: int
    """The other one's place."""
    size_bytes: int
    """Bytes that passed while more waited; 0: no message was followed."""
    seconds: float
    """Time in which they passed."""
    at_least: bool
    """Whether they had passed before it could be told how fast: the link may be faster."""
    round_trip_s: float | None
    """Round trip of a small packet, the shortest of the newest few; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One rank's actions in one step, which may still be undone: they took their time all the same."""

    rank: int
    """Its number."""
    place: int
    step: int
    plan: tuple[int, int]
    """(epoch, version) of the plan that it followed."""
    times: tuple[StageTime, ...]
    frozen: bool
    """Whether weight gradients may have been left out."""
    prefix: int = 0
    """Layers of the model, from the input up, that had no backward pass."""
    halves: tuple[tuple[StageTime, ...], ...] = ()
    """The same for the earlier and the later half of the step's actions, outliers bounded; empty: there are too few."""
    surroundings: FeatureSample | None = None
    """The newest sample of its device and host; None where they are not sampled."""
    links: tuple[LinkTime, ...] = ()
    """Its links to others, as far as they were measured since its last report."""
    waited_s: float | None = None
    """Time that its actions waited for what other ranks send; None: unknown."""
