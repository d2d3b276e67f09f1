"""In what a layer computes, and what of it that is: the one place that knows what `job.precision` means.

With `bfloat16` weights, activations and boundaries have 16 bits. Gradients are summed in 32, and the weights that
training changes, the masters, have 32: what the module holds is their cast. With `bfloat16-autocast` torch casts
operation by operation, and everything that is kept has 32 bits.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from workers.protocol import JobError

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply in bfloat16; on older ones torch emulates it, slowly."""

_AUTOCAST = {"bfloat16-autocast": torch.bfloat16}
_CAST = {"bfloat16": torch.bfloat16}


def check_gpu(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raises:
    JobError: a GPU of this compute capability does not compute in `precision`.
    """
    if precision != "float32" and capability < BFLOAT16_SINCE:
        has, since = (".".join(map(str, version)) for version in (capability, BFLOAT16_SINCE))
        raise JobError(
            f"job.precision = {json.dumps(precision)}, but {name} has compute capability {has}, and GPUs compute in"
            f' bfloat16 from {since} on: set job.precision = "float32", or use newer GPUs'
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast on `device`, if that is what `precision` says."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    # The deferral caches casts across microbatches; autocast's cache would keep a step's weights too long.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def boundary_dtype(precision: str) -> torch.dtype | None:
    """What floats between layers are cast to; None: they stay as they are."""
    return _CAST.get(precision)


def cast_parameters(module: nn.Module, precision: str) -> dict[str, torch.dtype]:
    """Parameter -> in what `module` is to hold it, for those that it does not hold so yet: all of 32 bits, but those of
    a module with running statistics, which stay together with these."""
    dtype = _CAST.get(precision)
    if dtype is None:
        return {}
    kept = {id(p) for owner in _with_statistics(module) for p in owner.parameters(recurse=False)}
    return {
        name: dtype
        for name, parameter in module.named_parameters()
        if parameter.dtype == torch.float32 and id(parameter) not in kept
    }


@torch.no_grad()
def cast_constants_(module: nn.Module, precision: str) -> None:
    """Cast what training does not change: fixed parameters, and buffers that the module does not save."""
    dtype = _CAST.get(precision)
    if dtype is None:
        return
    casts = cast_parameters(module, precision)
    for name, parameter in module.named_parameters():
        if name in casts and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if (
                buffer is not None
                and buffer.dtype == torch.float32
                and name in owner._non_persistent_buffers_set
            ):
                owner._buffers[name] = buffer.to(dtype)


def cast_floats(tensors: tuple[Tensor, ...], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """`tensors`, those of 32 bits in `dtype`; as they are if that is None."""
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if t.dtype == torch.float32 else t for t in tensors)


def _with_statistics(module: nn.Module) -> list[nn.Module]:
    return [
        owner
        for owner in module.modules()
        if any(
            buffer is not None
            and buffer.is_floating_point()
            and name not in owner._non_persistent_buffers_set
            for name, buffer in owner._buffers.items()
        )
    ]
