"""Whether frozen layers make the same of a sample whenever and beside whichever others it comes: tried on a microbatch.

Only then do kept activations have the bits of computed ones. Tried on every kind of device and depth before the first
use: it depends on layers (dropout and batch norms in training mode look beyond the sample) and on kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.activation_cache.row_form import why_not_by_rows
from workers.layers.layer import Layer, attributes_kept

NEIGHBOURS = "what the frozen layers make of a sample depends on the others of its microbatch"
WAY_OUT = 'freeze.frozen_mode = "eval" turns that off'


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial."""

    why_not: str
    """Why activations cannot be kept; empty if they can."""
    computed_s: float = 0.0
    """Time in which the layers computed the microbatch."""
    fine: int = 0
    """If not: the first layers of which they can, as far as it is known."""


def tried(
    layers: Sequence[Layer],
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    *,
    training: bool,
    mixed: bool,
    key: int,
    wait: Callable[[], None],
) -> TrialResult:
    """Try `layers`, which made `outputs` of `inputs`, each [B, ...], on the same samples with other draws, and where
    samples come in another order or beside others each time, so. Buffers are left as they were found.

    Args:
        training: mode of the layers.
        mixed: whether samples come beside others each time.
        key: of draws that differ from those that made `outputs`.
        wait: returns once the device has done what it was given.
    """
    rows = inputs[0].shape[0] if inputs and inputs[0].dim() else 0
    if not rows:
        return TrialResult(f"layer {layers[0].name} has no inputs that are a row for each sample")
    if why_not := why_not_by_rows(inputs, rows):
        return TrialResult(f"of the inputs of layer {layers[0].name} {why_not}")
    if why_not := why_not_by_rows(outputs, rows):
        return TrialResult(f"of the outputs of layer {layers[-1].name} {why_not}")
    buffers = [buffer for layer in layers for buffer in layer.module.buffers()]
    before = [buffer.clone() for buffer in buffers]

    def run(batch: tuple[Tensor, ...], shift: int) -> tuple[Tensor, ...]:
        for layer in layers:
            with attributes_kept(layer.module):
                batch = layer.forward_frozen(batch, key + shift, training=training)
        return batch

    try:
        wait()
        begun_s = time.perf_counter()
        again = run(inputs, 0)
        wait()
        computed_s = time.perf_counter() - begun_s
        follows = any(not torch.equal(now, was) for now, was in zip(buffers, before, strict=True))
        if follows or not _equal(again, outputs):
            return _what_changes(layers, inputs, training, key)
        for order in ([*range(1, rows), 0], ([*range(0, rows, 2)] * 2)[:rows]) if mixed else ():
            if not _equal(run(_of(inputs, order), 1), _of(outputs, order)):
                why_not = NEIGHBOURS
                return TrialResult(why_not)
    except Exception as error:
        # Of layers that users wrote: those that the job wants to compute have been computed.
        return TrialResult(f"the frozen layers fail on the same samples in another order: {error}")
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return TrialResult("", computed_s)


def _what_changes(
    layers: Sequence[Layer], inputs: tuple[Tensor, ...], training: bool, key: int
) -> TrialResult:
    """The first layer that makes something else of the same inputs each time."""
    batch = inputs
    for number, layer in enumerate(layers):
        before = [buffer.clone() for buffer in layer.module.buffers()]
        first = layer.forward_frozen(batch, key, training=training)
        if any(not torch.equal(now, was) for now, was in zip(layer.module.buffers(), before, strict=True)):
            why_not = f"the buffers of frozen layer {layer.name} go on following the batches: {WAY_OUT}"
            return TrialResult(why_not, fine=number)
        if not _equal(first, layer.forward_frozen(batch, key + 1, training=training)):
            return TrialResult(f"frozen layer {layer.name} draws anew in each step: {WAY_OUT}", fine=number)
        batch = first
    return TrialResult("the frozen layers make something else of the same samples each time")


def _of(tensors: Sequence[Tensor], order: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows `order` of canonical tensors, laid out as they are."""
    return tuple(
        torch.empty_like(tensor).copy_(tensor[torch.tensor(order, device=tensor.device)])
        for tensor in tensors
    )


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they have the same bits."""
    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(some, others, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
