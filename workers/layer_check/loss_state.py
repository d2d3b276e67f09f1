"""The loss in training's way and in that of a plain loop, and what it keeps from one pass to the next.

Several microbatches are on their way at once: the second goes forward before the first goes back. A loss that keeps a
state outside of buffers, moves what it trains, or draws on its way back makes other numbers then, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.layer_check.writes import watched
from workers.layers.absent import is_absent
from workers.layers.backward import backward
from workers.layers.layer import Pass, Tensors, input_gradients
from workers.layers.loss import Loss
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.state.hidden import bits, values_behind

_INSTEAD = (
    "is no state of the model: hold it in a persistent buffer of a module that is the loss, and draw from the default"
    " generators of torch, random or numpy, whose draws are keyed"
)


def check_loss(loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int) -> None:
    """Compare two microbatches through `loss` with a plain loop. Afterwards it is as it was.

    Args:
        outputs, targets: those of a microbatch, as `Loss.forward` takes them.
        draw_key: of its random draws.

    Raises:
        JobError: the loss keeps a state outside of buffers, changes a parameter or its targets, gives a parameter a
            gradient, draws in its backward pass, or has other numbers than in a plain loop.
    """
    aside, buffers = loss.layer.summed.set_aside(), [buffer.clone() for buffer in loss.layer.buffers]
    try:
        _compare(loss, outputs, targets, draw_key, buffers)
    finally:
        _restore(loss, buffers)
        loss.layer.summed.take_back(aside)


def _compare(
    loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int, buffers: Sequence[Tensor]
) -> None:
    # Numbers that carry no gradient may be a mask, or labels.
    compared = loss.layer.compared
    others = tuple(
        (0.75 * t.detach()).requires_grad_()
        if t.requires_grad and (compared is None or number in compared.attached)
        else t
        for number, t in enumerate(outputs)
    )
    _refuse_states(loss, outputs, others, targets, draw_key, buffers)
    both = ((outputs, draw_key), (others, rng.key(draw_key, "another microbatch")))
    _restore(loss, buffers)
    expected, drew = _plain(loss, both, targets)
    _restore(loss, buffers)
    found = _in_training(loss, both, targets)
    apart = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if apart and drew:
        raise JobError(
            "the loss draws in its backward pass, from wherever the generators then stand: draw in the forward pass"
        )
    if apart:
        raise JobError(
            f"the loss does not train as in a plain loop: its {apart[0]} is another, once a second microbatch goes"
            " forward before the first goes back. What it keeps from one pass to the next, or from forward to backward,"
            f" {_INSTEAD}"
        )


def _refuse_states(
    loss: Loss, outputs: Tensors, others: Tensors, targets: Tensors, draw_key: int, buffers: Sequence[Tensor]
) -> None:
    """Refuse a loss that passes from the same inputs leave in another state, with one from others in between or not."""
    parameters = {} if loss.trained is None else dict(loss.trained.named_parameters())
    given = {name: (p.data_ptr(), bits(p)) for name, p in parameters.items()}
    versions = [t._version for t in (*outputs, *targets)]
    first, writes = watched(lambda: _after_pass(loss, others, targets, draw_key, buffers))
    _, again, last = (
        _after_pass(loss, each, targets, draw_key, buffers) for each in (outputs, others, others)
    )
    if [t._version for t in (*outputs, *targets)] != versions:
        raise JobError(
            "the loss changes its inputs or targets in place: use the operation that returns a new tensor"
        )
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise JobError(
                f"the loss gives its parameter {name} a gradient in its forward pass, as backward() does there: take it"
                " by torch.autograd.grad, which adds it to none"
            )
        if writes.into(parameter) or given[name] != (parameter.data_ptr(), bits(parameter)):
            raise JobError(
                f"the loss changes its parameter {name} in its forward pass, which training changes: hold it in a"
                " persistent buffer (register_buffer)"
            )
    for (one, before), (other, after) in ((first, again), (again, last)):
        if changed := [name for name, value in before.items() if name in after and after[name] != value]:
            raise JobError(f"the loss changes its {changed[0]} in each pass, which {_INSTEAD}")
        if one != other:
            raise JobError(f"the loss computes something else each time. What it keeps {_INSTEAD}")


def _after_pass(
    loss: Loss, outputs: Tensors, targets: Tensors, draw_key: int, buffers: Sequence[Tensor]
) -> tuple[str, dict[str, Any]]:
    """(what the loss is, what it holds afterwards)."""
    _restore(loss, buffers)
    with loss.plain(outputs, targets, draw_key) as (_, value):
        loss.check_graph(value)
        return bits(value.detach()), values_behind(loss.function)


def _plain(loss: Loss, both: Sequence[tuple[Tensors, int]], targets: Tensors) -> tuple[dict[str, str], bool]:
    """The numbers of a plain loop, in which a microbatch goes forward and back before the next one, and whether
    something drew on the way back."""
    found: dict[str, str] = {}
    drew = False
    for number, (inputs, key) in enumerate(both):
        with loss.plain(inputs, targets, key) as (leaves, value):
            found[f"value {number}"] = bits(value.detach())
            if value.requires_grad:
                drew |= _walk(loss, value)
        found |= _of_outputs(number, input_gradients(leaves))
    return found | _of_module(loss), drew


def _walk(loss: Loss, value: Tensor) -> bool:
    """Go back; returns whether that drew, from the generators of the whole process."""
    with rng.turn:
        drawn = rng.state(loss.device)
        backward([value], [torch.full_like(value, loss.scale)])
        return drawn != rng.state(loss.device)


def _in_training(loss: Loss, both: Sequence[tuple[Tensors, int]], targets: Tensors) -> dict[str, str]:
    found: dict[str, str] = {}
    passes: list[Pass] = []
    for number, (inputs, key) in enumerate(both):
        value, done = loss.forward(inputs, targets, key, keep=True)
        found[f"value {number}"] = bits(value)
        passes.append(done)
    for number, done in enumerate(passes):
        found |= _of_outputs(number, [t for t in loss.backward(done) if t is not None])
    return found | _of_module(loss)


def _of_outputs(number: int, gradients: Sequence[Tensor]) -> dict[str, str]:
    return {
        f"gradient {number} of output {output}": "absent" if is_absent(t) else bits(t)
        for output, t in enumerate(gradients)
    }


def _of_module(loss: Loss) -> dict[str, str]:
    """The gradients of its parameters, which give them up, and its buffers."""
    trained = {} if loss.trained is None else dict(loss.trained.named_parameters())
    found = {f"gradient of {name}": bits(p.grad) for name, p in trained.items() if p.grad is not None}
    for parameter in trained.values():
        parameter.grad = None
    return found | {f"buffer {number}": bits(buffer) for number, buffer in enumerate(loss.layer.buffers)}


def _restore(loss: Loss, buffers: Sequence[Tensor]) -> None:
    loss.layer.summed.drop()
    with torch.no_grad():
        for buffer, before in zip(loss.layer.buffers, buffers, strict=True):
            buffer.copy_(before)
