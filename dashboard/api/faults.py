"""The body of a fault: a `workers.fault_injection.drill.DrillOrder` as clients send it. The controller checks what goes
together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dashboard.api.examples import example
from dashboard.api.models import StrictModel

Kind = Literal[
    "kill",
    "stop",
    "slow",
    "drop-link",
    "throttle-link",
    "oom",
    "fill-disk",
    "corrupt-checkpoint",
    "raise",
    "drain",
    "nan",
    "blind",
]
Phase = Literal[
    "forward",
    "backward",
    "before-commit",
    "in-commit",
    "after-commit",
    "saving",
    "migrating",
    "recovering",
]
Positive = Annotated[int, Field(gt=0, le=2**53)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FaultOrder(StrictModel):
    """One fault on one rank. It fires when the rank first reaches its phase in its step or a later one; without step
    and phase at once, or at the next place that fits."""

    kind: Kind
    """`freshet fault --help` says what each does."""
    step: Positive | None = None
    """It fires in this step or a later one; null: in any."""
    phase: Phase | None = None
    """The phase it fires in; null: any that fits."""
    after_s: Seconds = 0.0
    """It fires no sooner than so many seconds from now."""
    times: Positive = 1
    """Number of times that it fires."""
    seconds: PositiveFinite | None = None
    """Duration (`stop`, `fill-disk`), or time until the kill (`drain`), in seconds."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Factor on the time of every action (`slow`)."""
    bytes_per_s: PositiveFinite | None = None
    """The bandwidth of the link (`throttle-link`)."""
    limit_bytes: Positive | None = None
    """Memory limit of the rank's tensors (`oom`)."""
    steps: Positive | None = None
    """Duration in steps (`slow`, `throttle-link`, `oom`); null: for good."""


class DrillOrder(
    StrictModel, json_schema_extra=example({"rank": 1, "fault": {"kind": "slow", "factor": 2.0, "steps": 10}})
):
    """A `fault` on a rank, or a `node` to drain: one of them."""

    rank: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """The number of the rank that has the `fault`; null, where any rank will do: the lowest."""
    fault: FaultOrder | None = None
    """The fault to inject, and when it fires."""
    node: str | None = Field(default=None, max_length=200)
    """The node to drain: its id, a prefix of it, or its host."""
    deadline_s: Seconds = 30.0
    """Seconds until the node is gone."""

    @model_validator(mode="after")
    def _one(self) -> DrillOrder:
        if (self.fault is None) == (self.node is None):
            raise ValueError("send either fault or node")
        return self
