"""A loss that keeps a state, moves what it trains, or draws on its way back is refused, as such a layer is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.deferred.queue import WeightGradQueue
from workers.layer import Pass, Tensors, carries_gradient
from workers.loss import Loss
from workers.protocol import JobError
from workers.reproducibility import rng
from workers.state.hidden import bits, values_behind

_INSTEAD = (
    "is no state of the model: hold it in a persistent buffer of a module that is the loss, and draw from the default"
    " generators of torch, random or numpy, whose draws are keyed"
)


def check_loss(loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int) -> None:
    """Run passes from the same inputs, with one from others in between or not: they must leave the same.

    Args:
        outputs, targets: those of a microbatch, as `Loss.forward` takes them.
        draw_key: of its random draws.

    Raises:
        JobError: the loss keeps a state outside of buffers, changes a parameter, gives one a gradient, or draws in its
            backward pass.
    """
    others = tuple(
        (0.75 * t.detach()).requires_grad_(t.requires_grad) if carries_gradient(t) else t for t in outputs
    )
    parameters = {} if loss.trained is None else dict(loss.trained.named_parameters())
    given = {name: (p.data_ptr(), bits(p)) for name, p in parameters.items()}
    aside = loss.layer.summed.set_aside()
    try:
        first, _, again, last = (
            _after_pass(loss, each, targets, draw_key) for each in (others, outputs, others, others)
        )
        early = [name for name, p in parameters.items() if p.grad is not None]
    finally:
        loss.layer.summed.take_back(aside)
    if early:
        raise JobError(
            f"the loss gives its parameter {early[0]} a gradient in its forward pass, as backward() does there: take it"
            " by torch.autograd.grad, which adds it to none"
        )
    for name, parameter in parameters.items():
        if given[name] != (parameter.data_ptr(), bits(parameter)):
            raise JobError(
                f"the loss changes its parameter {name} in its forward pass, which training changes: hold it in a"
                " persistent buffer (register_buffer)"
            )
    for (one, before), (other, after) in ((first, again), (again, last)):
        if changed := [name for name, value in before.items() if name in after and after[name] != value]:
            raise JobError(f"the loss changes its {changed[0]} in each pass, which {_INSTEAD}")
        if one != other:
            raise JobError(f"the loss computes something else each time. What it keeps {_INSTEAD}")


def _after_pass(loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int) -> tuple[str, dict[str, Any]]:
    """(what the loss is, what it holds afterwards); it goes back to its inputs too."""
    done = Pass(draw_key, (), None, WeightGradQueue())
    value = loss.run(done, outputs, targets, keep=True, write=False)
    loss.check_graph(value)
    leaves = [*{id(t): t for t in done.inputs if t.requires_grad}.values()]
    if leaves and value.requires_grad:
        _check_draws(loss, value, leaves)
    return bits(value), values_behind(loss.function)


def _check_draws(loss: Loss, value: Tensor, leaves: list[Tensor]) -> None:
    # Whoever draws holds the turn: no other thread does meanwhile.
    with rng.turn:
        drawn = rng.state(loss.device)
        torch.autograd.grad(value, leaves, allow_unused=True)
        if drawn != rng.state(loss.device):
            raise JobError(
                "the loss draws in its backward pass, from wherever the generators then stand: draw in the forward pass"
            )
