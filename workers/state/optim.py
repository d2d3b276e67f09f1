"""The optimizers: one implementation of each update rule, the same on every rank and for every standby.

Only elementwise operations, so that the bits do not depend on which parameters are updated together: those of a layer
are, as far as they lie side by side. They know no gradient norm, no freezing rule and no process group.
"""

from __future__ import annotations

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
from workers.state.optimizer_config import OptimizerConfig, ParameterGroup
from workers.state.schedules import learning_rate
from workers.state.torch_rules import RULES, Part


@dataclass(frozen=True)
class _Run:
    """Parameters that lie side by side and are updated alike."""

    places: tuple[ParameterPlace, ...]
    count: int
    """Updates of each, with this one."""
    decay: float
    lr_factor: float


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

    def __init__(self, config: OptimizerConfig, steps: int, layers: int = 1) -> None:
        """
        Args:
            config: the rule's settings.
            steps: optimizer steps of the entire job, where the schedule ends.
            layers: of the whole model.
        """
        self.config = config
        self.steps = steps
        self.layers = layers

    def lr(self, step: float) -> float:
        """Learning rate of `step` (0 is the first), as `learning_rate` has it."""
        return learning_rate(self.config, step, self.steps)

    def weight_decay(self, layer_name: str, parameter_name: str, parameter: Tensor) -> float:
        """Weight decay of a parameter: its group's, else that of matrices and above, unless a `no_decay` pattern
        excludes them."""
        name = f"{layer_name}.{parameter_name}"
        group = self._group(name)
        if group is not None and group.weight_decay is not None:
            return group.weight_decay
        return self.config.weight_decay if parameter.ndim >= 2 and not self._excluded(name) else 0.0

    def _lr_factor(self, layer: int, name: str) -> float:
        group = self._group(name)
        own = 1.0 if group is None else group.lr_factor
        return own * self.config.layer_decay ** (self.layers - 1 - layer)

    def _group(self, name: str) -> ParameterGroup | None:
        for group in self.config.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                return group
        return None

    def check_ties(self, ties: Sequence[Sequence[ParameterRef]]) -> None:
        """Raises: JobError: settings differ for the copies of a tied parameter, which would make them diverge."""
        if ties and self.config.layer_decay != 1.0:
            raise JobError(
                f"optimizer.layer_decay = {self.config.layer_decay:g} gives layers rates of their own, and"
                f" {', '.join(map(str, ties[0]))} are tied: use optimizer.groups, or untie them"
            )
        for group in ties:
            if len({id(self._group(str(ref))) for ref in group}) > 1:
                raise JobError(
                    f"optimizer.groups has {', '.join(map(str, group))}, which are tied, in different groups: match all"
                    " of them in one, or none"
                )
            out = [str(ref) for ref in group if self._excluded(str(ref))]
            if out and len(out) < len(group):
                raise JobError(
                    f"optimizer.no_decay matches {', '.join(out)}, which is tied with"
                    f" {', '.join(str(ref) for ref in group if str(ref) not in out)}: match all of them or none"
                )

    def _excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.no_decay)

    @torch.no_grad()
    def update_(self, state: LayerState, gradients: Gradients, scale: float, lr: float) -> None:
        """Apply one step to `state`, in place.

        Args:
            state: the layer; its weights, slots and update counts change.
            gradients: not modified. An absent parameter gets no update at all: no decay, no momentum decay,
                no step count (TimelyFreeze eq. 18).
            scale: factor that each gradient is first multiplied by, for mean and clipping.
            lr: learning rate of the step.
        """
        assert gradients.keys() <= state.updates.keys(), f"gradients of no parameter of layer {state.name}"
        if not gradients:
            return
        assert state.flats, f"layer {state.name} is a copy without buffers to update"
        assert state.stored is None, f"the moments of layer {state.name} are not in memory"
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
                        lr * run.lr_factor,
                        run.decay,
                    )
                    if flat.cast is not None:
                        flat.cast[part].copy_(flat.weights[part])
        # Their buffer has changed; what autocast casts of a weight is made again if its version has.
        increment_version([state.weights[name] for name in gradients])

    def _runs(self, state: LayerState, layout: Layout, names: Collection[str]) -> Iterator[_Run]:
        """The parameters `names`, together where they lie side by side and are updated alike."""

        def alike(place: ParameterPlace) -> tuple[bool, int, float, float]:
            decay = self.weight_decay(state.name, place.name, state.weights[place.name])
            factor = self._lr_factor(state.layer, f"{state.name}.{place.name}")
            return place.name in names, state.updates[place.name], decay, factor

        for (there, count, decay, factor), places in groupby(layout.places, key=alike):
            if there:
                yield _Run(tuple(places), count, decay, factor)

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
    """Gradient descent with momentum and coupled weight decay: the operations of
    `torch.optim.SGD(foreach=False, fused=False)` in their order."""

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
        direction, momentum = gradient, self.config.momentum
        if momentum != 0.0:
            direction = slots["momentum_buffer"]
            # The first update copies: adding to zeros would turn -0.0 into 0.0.
            if count == 1:
                direction.copy_(gradient)
            else:
                direction.mul_(momentum).add_(gradient, alpha=1 - self.config.dampening)
            if self.config.nesterov:
                direction = gradient.add(direction, alpha=momentum)
        weights.add_(direction, alpha=-lr)


class OfTorch(Optimizer):
    """One of the rules in `workers/state/torch_rules.py`."""

    def __init__(self, config: OptimizerConfig, steps: int, layers: int = 1) -> None:
        super().__init__(config, steps, layers)
        self._rule = RULES[config.name]

    def slot_names(self) -> tuple[str, ...]:
        return self._rule.slots(self.config)

    def _update_(
        self,
        weights: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        self._rule.update(self.config, Part(weights, gradient, slots, count, lr, decay))


def make_optimizer(config: OptimizerConfig, steps: int, layers: int = 1) -> Optimizer:
    """The optimizer that `config.name` names, for a job of `steps` steps.

    Args:
        layers: of the whole model, on whose number `layer_decay` depends.
    """
    if config.name == "sgd":
        return SGD(config, steps, layers)
    if config.name == "adamw" and not config.amsgrad:
        return AdamW(config, steps, layers)
    return OfTorch(config, steps, layers)
