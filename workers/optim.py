"""The optimizers: one implementation of each update rule, the same on every rank and for every standby.

Only elementwise operations, one parameter at a time, so that the bits do not depend on which parameters are
updated together. They know no gradient norm, no freezing rule and no process group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from workers.config import OptimizerConfig
from workers.layer_state import Gradients, LayerState
from workers.models.definition import ParameterRef
from workers.protocol import JobError


class Optimizer(ABC):
    """An update rule with its learning rate schedule. Holds no state: the `LayerState`s do."""

    def __init__(self, config: OptimizerConfig, steps: int) -> None:
        """
        Args:
            config: the rule's settings.
            steps: optimizer steps of the entire job, where the cosine ends.
        """
        self.config = config
        self.steps = steps

    def lr(self, step: int) -> float:
        """Learning rate of `step` (0 is the first): linear warm-up, then a cosine from `lr` down to
        `min_lr_fraction * lr` at the last step. A cosine of a single step stays at `lr`."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, self.steps - 1 - config.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * cosine)

    def decays(self, layer_name: str, parameter_name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies: to matrices and above, unless a `no_decay` pattern excludes them."""
        return parameter.ndim >= 2 and not self._excluded(f"{layer_name}.{parameter_name}")

    def check_ties(self, ties: Sequence[Sequence[ParameterRef]]) -> None:
        """Raises: JobError: `no_decay` excludes some copies of a tied parameter but not others, which would
        make them diverge.
        """
        for group in ties:
            out = [str(ref) for ref in group if self._excluded(str(ref))]
            if out and len(out) < len(group):
                raise JobError(
                    f"optimizer.no_decay matches {', '.join(out)}, which is tied with"
                    f" {', '.join(str(ref) for ref in group if str(ref) not in out)}: match all of them or none"
                )

    def _excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.no_decay)

    @torch.no_grad()
    def update_(self, state: LayerState, gradients: Gradients, scale: float, step: int) -> None:
        """Apply one step to `state`, in place.

        Args:
            state: the layer; its weights, slots and update counts change.
            gradients: not modified. An absent parameter gets no update at all: no decay, no momentum decay,
                no step count (TimelyFreeze eq. 18).
            scale: factor that each gradient is first multiplied by, for mean and clipping.
            step: steps committed before this one; determines the learning rate.
        """
        assert gradients.keys() <= state.weights.keys(), f"gradients of no parameter of layer {state.name}"
        lr = self.lr(step)
        for name, parameter in state.weights.items():
            if name not in gradients:
                continue
            # The scratch has the parameter's layout, whatever the gradient's: a product rounds the same in
            # any memory order, but the operations after it need not.
            gradient = torch.empty_like(parameter, requires_grad=False)
            torch.mul(gradients[name], scale, out=gradient)
            state.updates[name] += 1
            decay = self.config.weight_decay if self.decays(state.name, name, parameter) else 0.0
            self._update_parameter_(parameter, gradient, state.slots[name], state.updates[name], lr, decay)

    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Names of the tensors that the rule keeps for each parameter."""

    @abstractmethod
    def _update_parameter_(
        self,
        parameter: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        """Update `parameter` and `slots`. `gradient` is scratch, free to overwrite; `count` includes this
        update."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2): the operations of
    `torch.optim.AdamW(foreach=False, fused=False)` in their order, so the same bits."""

    def slot_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update_parameter_(
        self,
        parameter: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        first, second = slots["exp_avg"], slots["exp_avg_sq"]
        if decay != 0.0:
            parameter.mul_(1 - lr * decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = torch.sqrt(second, out=gradient)
        denominator.div_((1 - beta2**count) ** 0.5).add_(self.config.eps)
        parameter.addcdiv_(first, denominator, value=-(lr / (1 - beta1**count)))


class SGD(Optimizer):
    """Gradient descent with heavy-ball momentum and coupled weight decay: the operations of
    `torch.optim.SGD(foreach=False, fused=False)` without dampening or Nesterov's step, in their order."""

    def slot_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.config.momentum != 0.0 else ()

    def _update_parameter_(
        self,
        parameter: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        if decay != 0.0:
            gradient.add_(parameter, alpha=decay)
        direction = gradient
        if self.config.momentum != 0.0:
            direction = slots["momentum_buffer"]
            # The first update copies: adding to zeros would turn -0.0 into 0.0.
            if count == 1:
                direction.copy_(gradient)
            else:
                direction.mul_(self.config.momentum).add_(gradient)
        parameter.add_(direction, alpha=-lr)


def make_optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    """The optimizer that `config.name` names, for a job of `steps` steps."""
    return {"adamw": AdamW, "sgd": SGD}[config.name](config, steps)
