"""The fault that a drill injects into a rank, and when it fires: a value that travels as JSON. No torch, no effects."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from planner.wording import counted
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.errors import JobError
from workers.protocol.section import Positive, Section

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]

AT_ANY_TIME = frozenset(
    {FaultKind.KILL, FaultKind.STOP, FaultKind.DROP_LINK, FaultKind.CORRUPT_CHECKPOINT, FaultKind.DRAIN}
)
"""Kinds that can fire at any time, outside of a phase."""
_ONLY_PHASE = {
    FaultKind.SLOW: FaultPhase.FORWARD,
    FaultKind.THROTTLE_LINK: FaultPhase.FORWARD,
    FaultKind.OOM: FaultPhase.FORWARD,
    FaultKind.NAN: FaultPhase.BACKWARD,
    FaultKind.FILL_DISK: FaultPhase.SAVING,
    FaultKind.BLIND: FaultPhase.IN_COMMIT,
}
_NEEDED = {
    FaultKind.STOP: ("seconds",),
    FaultKind.DRAIN: ("seconds",),
    FaultKind.SLOW: ("factor",),
    FaultKind.THROTTLE_LINK: ("bytes_per_s",),
    FaultKind.OOM: ("limit_bytes",),
}
_TAKEN = {
    "seconds": (FaultKind.STOP, FaultKind.FILL_DISK, FaultKind.DRAIN),
    "factor": (FaultKind.SLOW,),
    "bytes_per_s": (FaultKind.THROTTLE_LINK,),
    "limit_bytes": (FaultKind.OOM,),
    "steps": (FaultKind.SLOW, FaultKind.THROTTLE_LINK, FaultKind.OOM),
}


class Fault(Section):
    """One fault on one rank. It fires the first time that the rank reaches its phase in its step or a later one, and no
    sooner than `after_s` after it was armed. Without step and phase, a kind in `AT_ANY_TIME` fires at that time."""

    kind: FaultKind
    """The kind of fault."""
    step: Positive | None = None
    """It fires in this step or a later one; unset: in any."""
    phase: FaultPhase | None = None
    """The phase it fires in; unset: any."""
    after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds from arming."""
    times: Positive = 1
    """Number of times that it fires."""
    seconds: PositiveFinite | None = None
    """Duration (`stop`, `fill-disk`), or time until the kill (`drain`), in seconds."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Factor by which every action is slowed down (`slow`)."""
    bytes_per_s: PositiveFinite | None = None
    """The bandwidth of the link (`throttle-link`)."""
    limit_bytes: Positive | None = None
    """Memory limit of the rank's tensors (`oom`)."""
    steps: Positive | None = None
    """Number of steps that it lasts (`slow`, `throttle-link`, `oom`); unset: for good."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = self.kind
        only = _ONLY_PHASE.get(kind)
        if only is not None and self.phase not in (None, only):
            raise JobError(f"{kind} fires in phase {only}, not in {self.phase}: leave the phase out")
        for name in _NEEDED.get(kind, ()):
            if getattr(self, name) is None:
                raise JobError(f"{kind} needs {name}")
        for name, kinds in _TAKEN.items():
            if getattr(self, name) is not None and kind not in kinds:
                raise JobError(
                    f"{kind} takes no {name}; only {' and '.join(kinds)} {'does' if len(kinds) == 1 else 'do'}"
                )
        return self

    @property
    def where(self) -> FaultPhase | None:
        """The phase it fires in; None for any."""
        return self.phase or _ONLY_PHASE.get(self.kind)

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.seconds is not None:
            words.append(f"for {self.seconds:g} s")
        if self.factor is not None:
            words.append(f"{self.factor:g} times")
        if self.bytes_per_s is not None:
            words.append(f"to {self.bytes_per_s:g} bytes/s")
        if self.limit_bytes is not None:
            words.append(f"beyond {self.limit_bytes:,} bytes")
        if self.steps is not None:
            words.append(f"for {counted(self.steps, 'step')}")
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Fault:
        """Raises:
        JobError: `values` are not those of a fault.
        """
        try:
            return Fault.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise JobError(f"no such fault: {place}: {first['msg']}, got {first['input']!r}") from error
