"""Update rules of `torch.optim`, by the functions behind its classes: with `foreach=False` they compute each element by
itself, so they may be called on parts of flat buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from workers.state.optimizer_config import OptimizerConfig

NADAM_DECAY = 4e-3
"""Decay of NAdam's momentum, as torch has it."""


@dataclass(frozen=True)
class Part:
    """A part of a flat buffer that is to be updated, in place."""

    weights: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    count: int
    """Updates of it, with this one."""
    lr: float
    decay: float

    def state_steps(self) -> list[Tensor]:
        return [torch.tensor(float(self.count - 1))]


@dataclass(frozen=True)
class TorchRule:
    """One of the rules."""

    slots: Callable[[OptimizerConfig], tuple[str, ...]]
    update: Callable[[OptimizerConfig, Part], None]


def _two_decays(config: OptimizerConfig, part: Part) -> dict[str, Any]:
    """Settings of the rules with two moments."""
    return {
        "foreach": False,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "lr": part.lr,
        "weight_decay": part.decay,
        "eps": config.eps,
    }


def _adam(config: OptimizerConfig, part: Part, *, decoupled: bool = False) -> None:
    greatest = part.slots.get("max_exp_avg_sq")
    adam(
        [part.weights],
        [part.gradient],
        [part.slots["exp_avg"]],
        [part.slots["exp_avg_sq"]],
        [] if greatest is None else [greatest],
        part.state_steps(),
        fused=False,
        decoupled_weight_decay=decoupled,
        amsgrad=greatest is not None,
        maximize=False,
        **_two_decays(config, part),
    )


def _adamw(config: OptimizerConfig, part: Part) -> None:
    _adam(config, part, decoupled=True)


@dataclass
class _Products:
    """The products of NAdam's momenta, which torch keeps for each parameter: they follow from the number of updates."""

    of: dict[float, list[Tensor]] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Copies of layers are updated beside training."""

    def before(self, beta1: float, count: int) -> Tensor:
        with self.turn:
            known = self.of.setdefault(beta1, [torch.ones((), dtype=torch.float32)])
            while len(known) < count:
                mu = beta1 * (1.0 - 0.5 * (0.96 ** (len(known) * NADAM_DECAY)))
                known.append(known[-1] * mu)
            return known[count - 1].clone()


_products = _Products()


def _nadam(config: OptimizerConfig, part: Part) -> None:
    nadam(
        [part.weights],
        [part.gradient],
        [part.slots["exp_avg"]],
        [part.slots["exp_avg_sq"]],
        [_products.before(config.beta1, part.count)],
        part.state_steps(),
        momentum_decay=NADAM_DECAY,
        **_two_decays(config, part),
    )


def _radam(config: OptimizerConfig, part: Part) -> None:
    radam(
        [part.weights],
        [part.gradient],
        [part.slots["exp_avg"]],
        [part.slots["exp_avg_sq"]],
        part.state_steps(),
        **_two_decays(config, part),
    )


def _adamax(config: OptimizerConfig, part: Part) -> None:
    adamax(
        [part.weights],
        [part.gradient],
        [part.slots["exp_avg"]],
        [part.slots["exp_inf"]],
        part.state_steps(),
        **_two_decays(config, part),
    )


def _rmsprop(config: OptimizerConfig, part: Part) -> None:
    momentum = part.slots.get("momentum_buffer")
    rmsprop(
        [part.weights],
        [part.gradient],
        [part.slots["square_avg"]],
        [],
        [] if momentum is None else [momentum],
        part.state_steps(),
        foreach=False,
        lr=part.lr,
        alpha=config.smoothing,
        eps=config.eps,
        weight_decay=part.decay,
        momentum=config.momentum,
        centered=False,
    )


def _adagrad(config: OptimizerConfig, part: Part) -> None:
    adagrad(
        [part.weights],
        [part.gradient],
        [part.slots["sum"]],
        part.state_steps(),
        fused=False,
        foreach=False,
        lr=part.lr,
        weight_decay=part.decay,
        lr_decay=0.0,
        eps=config.eps,
        maximize=False,
    )


def _adadelta(config: OptimizerConfig, part: Part) -> None:
    adadelta(
        [part.weights],
        [part.gradient],
        [part.slots["square_avg"]],
        [part.slots["acc_delta"]],
        part.state_steps(),
        foreach=False,
        lr=part.lr,
        rho=config.smoothing,
        eps=config.eps,
        weight_decay=part.decay,
        maximize=False,
    )


def _moments(config: OptimizerConfig) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if config.amsgrad else ()))


def _two_moments(config: OptimizerConfig) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _with_momentum(config: OptimizerConfig) -> tuple[str, ...]:
    return ("square_avg", *(("momentum_buffer",) if config.momentum != 0.0 else ()))


RULES: Mapping[str, TorchRule] = {
    "adam": TorchRule(_moments, _adam),
    "adamw": TorchRule(_moments, _adamw),
    "nadam": TorchRule(_two_moments, _nadam),
    "radam": TorchRule(_two_moments, _radam),
    "adamax": TorchRule(lambda config: ("exp_avg", "exp_inf"), _adamax),
    "rmsprop": TorchRule(_with_momentum, _rmsprop),
    "adagrad": TorchRule(lambda config: ("sum",), _adagrad),
    "adadelta": TorchRule(lambda config: ("square_avg", "acc_delta"), _adadelta),
}
"""By `optimizer.name`. A new one is a row here and a name there."""
