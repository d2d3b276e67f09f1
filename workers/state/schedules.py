"""Schedules of the learning rate after the warm-up: factors from 1 down, by progress. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workers.state.optimizer_config import OptimizerConfig


@dataclass(frozen=True)
class Along:
    """Where a step is."""

    progress: float
    """0 at the first step after the warm-up, 1 at the last step of the job."""
    step: float
    """Number of the step, from 0: where the batch has grown, of steps of the batch that the job began with."""
    after: float
    """Steps since the warm-up, from 0."""


Schedule = Callable[[OptimizerConfig, Along], float]
"""The factor on the peak learning rate."""


def _cosine(config: OptimizerConfig, at: Along) -> float:
    """Half a cosine (Loshchilov and Hutter 2017), as in transformers' `get_cosine_schedule_with_warmup`."""
    return _down(config, 0.5 * (1.0 + math.cos(math.pi * at.progress)))


def _linear(config: OptimizerConfig, at: Along) -> float:
    return _down(config, 1.0 - at.progress)


def _polynomial(config: OptimizerConfig, at: Along) -> float:
    return _down(config, (1.0 - at.progress) ** config.power)


def _inverse_root(config: OptimizerConfig, at: Along) -> float:
    """The inverse root of the step (Vaswani et al. 2017, eq. 3), 1 at the end of the warm-up."""
    timescale = config.warmup_steps or 1
    return math.sqrt(timescale / (timescale + at.after))


def _steps(config: OptimizerConfig, at: Along) -> float:
    """A factor at each of the milestones."""
    return config.gamma ** sum(at.step >= milestone for milestone in config.milestones)


def _stable_then_down(config: OptimizerConfig, at: Along) -> float:
    """Constant, then a linear decay over the last part of the job (Hu et al. 2024, "warmup-stable-decay")."""
    left = (1.0 - at.progress) / config.decay_fraction
    return _down(config, min(1.0, left))


def _down(config: OptimizerConfig, share: float) -> float:
    """`share` of the way from `min_lr_fraction` up to 1."""
    return config.min_lr_fraction + (1.0 - config.min_lr_fraction) * share


SCHEDULES: Mapping[str, Schedule] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": lambda config, at: 1.0,
    "inverse-sqrt": _inverse_root,
    "polynomial": _polynomial,
    "step": _steps,
    "warmup-stable-decay": _stable_then_down,
}
"""By `optimizer.schedule`. A new one is a row here and a name there."""


def learning_rate(config: OptimizerConfig, step: float, steps: int) -> float:
    """Learning rate of `step` (0 is the first) of a job of `steps` steps: linear warm-up, then the schedule. One of a
    single step after the warm-up stays at the peak. Both count in steps of the batch that the job begins with."""
    after = step - config.warmup_steps
    if after < 0:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, after / max(1, steps - 1 - config.warmup_steps))
    return config.lr * SCHEDULES[config.schedule](config, Along(progress, step, after))
