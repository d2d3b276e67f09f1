"""`model.lora`: what of a model adapters are trained for. No torch here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.section import Fraction, Positive, Section


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
