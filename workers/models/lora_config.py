"""`model.lora`: what of a model adapters are trained for. No torch here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from workers.protocol.section import Fraction, Positive, Section


class Lora(Section):
    """`model.lora`: adapters that are trained in place of the model's own matrices."""

    rank: Positive = 8
    """Rank of the adapters, r."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Their outputs are multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout probability of their inputs."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the modules that get one, such as `["q_proj", "v_proj"]`."""
    train: tuple[str, ...] = ()
    """Parameters that are trained as they are, such as those of a new head: patterns of LAYER.PARAMETER, as in
    `fixed`."""

    @model_validator(mode="before")
    @classmethod
    def _no_dora(cls, section: Any) -> Any:
        if isinstance(section, dict) and "use_dora" in section:
            raise PydanticCustomError(
                "dora",
                "use_dora is not trained here (DoRA), as it takes the norms of whole columns of a matrix and its"
                " adapter: leave it out",
            )
        return section
