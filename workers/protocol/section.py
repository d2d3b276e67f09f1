"""Base of the sections of a job spec, and the types of their values.

Every section is keyword-only and frozen, and refuses unknown keys.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Units = Literal["blocks", "halves"]
"""Parts of a transformer that are one layer each: a block, or its attention and its feed-forward layer."""
Shuffle = Literal["permutation", "feistel"]
"""Orders in which an epoch visits the samples, see `workers/data/sampling.py`."""
NonNegativeSeconds = Annotated[float, Field(ge=0)]


def _finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, which a checkpoint stores as JSON: it has no number for infinity."""
    for name, value in arguments.items():
        if not _is_finite(value):
            raise PydanticCustomError(
                "finite_number", "should hold finite numbers, check {name}", {"name": name}
            )
    return arguments


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


Arguments = Annotated[dict[str, Any], AfterValidator(_finite)]


class Section(BaseModel):
    """A frozen section of a spec."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
