"""Requests to disturb a running job on purpose, to see how it recovers. Values only."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from workers.fault_injection.fault import Fault
from workers.protocol.errors import JobError
from workers.protocol.section import NonNegative, Section


class Drill(Section):
    """A `fault` on a rank, or a `node` to drain. It travels as JSON."""

    rank: NonNegative | None = None
    """The number of the rank that has the `fault`; unset, where any rank will do: the lowest."""
    fault: Fault | None = None
    """The fault to inject, and when it fires."""
    node: str | None = None
    """The node to drain: its id, a prefix of it, or its host."""
    deadline_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds until the node is gone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.fault is None) == (self.node is None):
            raise JobError("a drill has a fault or a node to drain, one of them")
        if self.node is not None and self.rank is not None:
            raise JobError("a drain takes a rank or a node, not both")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Drill:
        """Raises:
        JobError: `values` are not those of a drill.
        """
        try:
            return Drill.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise JobError(f"no such drill: {place}: {first['msg']}, got {first['input']!r}") from error
