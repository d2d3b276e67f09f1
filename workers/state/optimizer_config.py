"""`[optimizer]` of a job spec. No torch here, so that any process can read it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.section import NonNegative, Positive, Section


class OptimizerConfig(Section):
    """`[optimizer]`: one implementation of each update rule, with the same bits on every rank."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `lr` that remains at the last step of the cosine."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay (AdamW); added to the gradient (SGD). Never applied to parameters of fewer than
    two dimensions."""
    no_decay: tuple[str, ...] = ()
    """More parameters without decay: shell patterns over `layer.parameter` names, e.g. `embed.*`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD: momentum."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up before the cosine."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; `null` turns clipping off."""
    max_skipped_steps: Positive = 20
    """A step whose gradient norm is not finite changes no weight. After this many such steps in a row the job
    ends."""
