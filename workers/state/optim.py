"""The optimizers: one implementation of each update rule, the same on every rank and for every standby.

Only elementwise operations, so that the bits do not depend on which parameters are updated together: those of a layer
are, as far as they lie side by side. They know no gradient norm, no freezing rule and no process group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from workers.protocol.errors import JobError
from workers.state.flat import Layout, ParameterPlace, side_by_side
from workers.state.layer_state import Gradients, LayerState, ParameterRef
from workers.state.optimizer_config import OptimizerConfig


@dataclass(frozen=True)
class _Run:
    """Parameters that lie side by side and are updated alike."""

    places: tuple[ParameterPlace, ...]
    count: int
    """Updates of each, with this one."""
    decay: float


PART = 2**17
"""Elements of a flat buffer that are updated together on a CPU: with their moments they fit its cache."""


def _parts(run: _Run, device: torch.device) -> Iterator[slice]:
    """The run in parts: the scratch of an update is no larger than a part."""
    begin, stop = run.places[0].begin, run.places[-1].stop
    step = PART if device.type == "cpu" else max(1, stop - begin)
    for first in range(begin, stop, step):
        yield slice(first, min(stop, first + step))


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
        assert gradients.keys() <= state.updates.keys(), f"gradients of no parameter of layer {state.name}"
        if not gradients:
            return
        assert state.flats, f"layer {state.name} is a copy without buffers to update"
        lr = self.lr(step)
        for name in gradients:
            state.updates[name] += 1
        layouts, weights = [flat.layout for flat in state.flats], [flat.weights for flat in state.flats]
        summed = side_by_side(layouts, gradients, weights)
        for flat, buffer in zip(state.flats, summed.buffers, strict=True):
            for run in self._runs(state, flat.layout, gradients.keys()):
                for part in _parts(run, flat.weights.device):
                    # Between parameters all are 0, and stay so.
                    self._update_(
                        flat.weights[part],
                        torch.mul(buffer[part], scale),
                        {slot: values[part] for slot, values in flat.slots.items()},
                        run.count,
                        lr,
                        run.decay,
                    )
                    if flat.cast is not None:
                        flat.cast[part].copy_(flat.weights[part])
        # Their buffer has changed; what autocast casts of a weight is made again if its version has.
        increment_version([state.weights[name] for name in gradients])

    def _runs(self, state: LayerState, layout: Layout, names: Collection[str]) -> Iterator[_Run]:
        """The parameters `names`, together where they lie side by side and are updated alike."""

        def alike(place: ParameterPlace) -> tuple[bool, int, bool]:
            weight = state.weights[place.name]
            there = place.name in names
            return there, state.updates[place.name], self.decays(state.name, place.name, weight)

        for (there, count, decays), places in groupby(layout.places, key=alike):
            if there:
                yield _Run(tuple(places), count, self.config.weight_decay if decays else 0.0)

    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Names of the tensors that the rule keeps for each parameter."""

    @abstractmethod
    def _update_(
        self,
        weights: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        """Update `weights` and `slots`, parts of flat buffers. `gradient` is scratch, free to overwrite; `count`
        includes this update. Where all are 0, as between parameters, weights and slots stay 0."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    On a CPU the operations of `torch.optim.AdamW(foreach=False, fused=False)` in their order, so the same bits. On a
    GPU `fused=True`: one kernel, which computes each element by itself too. On a CPU that one's bits depend on how a
    buffer is cut.
    """

    def slot_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update_(
        self,
        weights: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        first, second = slots["exp_avg"], slots["exp_avg_sq"]
        if weights.device.type != "cpu":
            before = torch.full((), count - 1, dtype=torch.float32, device=weights.device)
            adamw(
                [weights],
                [gradient],
                [first],
                [second],
                [],
                [before],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.config.eps,
                maximize=False,
            )
            return
        if decay != 0.0:
            weights.mul_(1 - lr * decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = torch.sqrt(second, out=gradient)
        denominator.div_((1 - beta2**count) ** 0.5).add_(self.config.eps)
        weights.addcdiv_(first, denominator, value=-(lr / (1 - beta1**count)))


class SGD(Optimizer):
    """Gradient descent with heavy-ball momentum and coupled weight decay: the operations of
    `torch.optim.SGD(foreach=False, fused=False)` without dampening or Nesterov's step, in their order."""

    def slot_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.config.momentum != 0.0 else ()

    def _update_(
        self,
        weights: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        if decay != 0.0:
            gradient.add_(weights, alpha=decay)
        direction = gradient
        if self.config.momentum != 0.0:
            direction = slots["momentum_buffer"]
            # The first update copies: adding to zeros would turn -0.0 into 0.0.
            if count == 1:
                direction.copy_(gradient)
            else:
                direction.mul_(self.config.momentum).add_(gradient)
        weights.add_(direction, alpha=-lr)


def make_optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    """The optimizer that `config.name` names, for a job of `steps` steps."""
    return {"adamw": AdamW, "sgd": SGD}[config.name](config, steps)
