"""`[optimizer]` of a job spec. No torch here, so that any process can read it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from workers.protocol.section import NonNegative, Positive, Section

Name = Literal["adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta", "sgd"]
_OF_MATRICES = ("adafactor", "lbfgs", "muon")


def _elementwise(name: Any) -> Any:
    if isinstance(name, str) and name.lower() in _OF_MATRICES:
        raise PydanticCustomError(
            "of_matrices",
            "{name} needs whole matrices, or all of them at once, and here each rank updates the elements that it has:"
            " choose one of {names}",
            {"name": name, "names": ", ".join(get_args(Name))},
        )
    return name


class ParameterGroup(Section):
    """`[[optimizer.groups]]`: parameters that are updated otherwise than the rest."""

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shell patterns over `layer.parameter` names, e.g. `embed.*`. The first group that matches a parameter counts."""
    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay, also of parameters of fewer than two dimensions; unset: as without the group."""


class OptimizerConfig(Section):
    """`[optimizer]`: one implementation of each update rule, with the same bits on every rank."""

    name: Annotated[Name, BeforeValidator(_elementwise)] = "adamw"
    """Update rule, of `torch.optim`."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    schedule: Literal[
        "cosine", "linear", "constant", "inverse-sqrt", "polynomial", "step", "warmup-stable-decay"
    ] = "cosine"
    """Learning rate after the warm-up. `cosine`, `linear` and `polynomial` fall to `min_lr_fraction` at the last step,
    `warmup-stable-decay` in the last part of the job; `step` is multiplied by `gamma` at each of `milestones`;
    `inverse-sqrt` falls with the root of the step."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `lr` that remains at the last step."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """`polynomial`: its exponent."""
    milestones: tuple[NonNegative, ...] = ()
    """`step`: steps from which on the learning rate is lower."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`step`: factor at each milestone."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`warmup-stable-decay`: share of the steps after the warm-up over which the learning rate falls."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay: decoupled for `adamw`, added to the gradient for the others. Never applied to parameters of fewer
    than two dimensions."""
    no_decay: tuple[str, ...] = ()
    """More parameters without decay: shell patterns over `layer.parameter` names, e.g. `embed.*`."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or weight decay."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate of a layer over that of the layer after it: below 1, layers near the input learn more slowly."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam and its kin: decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Adam and its kin: decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """All but SGD: added to the root of the second moment."""
    amsgrad: bool = False
    """`adamw` and `adam`: divide by the root of the largest second moment so far."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """`rmsprop` and `adadelta`: decay of the mean of squares."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """`sgd` and `rmsprop`: momentum."""
    nesterov: bool = False
    """`sgd`: Nesterov's step; needs momentum, and no dampening."""
    dampening: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`sgd`: part of each gradient that the momentum leaves out."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up before the schedule."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; `null` turns clipping off."""
    max_skipped_steps: Positive = 20
    """A step whose gradient norm is not finite changes no weight. After this many such steps in a row the job
    ends."""

    @property
    def adaptive(self) -> bool:
        """Whether the rule divides an update by the size of gradients."""
        return self.name != "sgd"
