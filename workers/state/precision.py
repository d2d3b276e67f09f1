"""Storage and compute dtypes of each `job.precision`. Which GPUs compute in them: `workers/devices/cuda.py`.

With `bfloat16` and `float16` weights, activations and boundaries have 16 bits. Gradients are summed in 32, and the
weights that training changes, the masters, have 32: what the module holds is their cast. With `bfloat16-autocast` torch
casts operation by operation, and everything that is kept has 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from workers.reproducibility.canonical import first_of_each

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_AUTOCAST = {"bfloat16-autocast": torch.bfloat16}
_CAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast on `device`, if that is what `precision` says."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    # The deferral caches casts across microbatches; autocast's cache would keep a step's weights too long.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def scales_loss(precision: str) -> bool:
    """Whether gradients would often be too small for `precision`, so that the loss is scaled up before them."""
    return precision == "float16"


def boundary_dtype(precision: str) -> torch.dtype | None:
    """Dtype to which floats between layers are cast; None: they stay as they are."""
    return _CAST.get(precision)


def cast_parameters(module: nn.Module, precision: str) -> dict[str, torch.dtype]:
    """Parameter -> in what `module` is to hold it, for those that it does not hold so yet: all of 32 bits, but those of
    a norm with running statistics, which torch applies in 32 to inputs of 16."""
    dtype = _CAST.get(precision)
    if dtype is None:
        return {}
    kept = {
        id(parameter)
        for norm in module.modules()
        if isinstance(norm, _NORMS) and norm.running_mean is not None
        for parameter in norm.parameters()
    }
    return {
        name: dtype
        for name, parameter in module.named_parameters()
        if parameter.dtype == torch.float32 and id(parameter) not in kept
    }


@torch.no_grad()
def cast_fixed_(module: nn.Module, casts: Mapping[str, torch.dtype]) -> None:
    """Cast the parameters among `casts` that training does not change: they need no master."""
    for name, parameter in module.named_parameters():
        if name in casts and not parameter.requires_grad:
            parameter.data = parameter.data.to(casts[name])


def cast_floats(tensors: tuple[Tensor, ...], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """`tensors`, those of 32 bits in `dtype`; as they are if that is None."""
    if dtype is None:
        return tensors
    cast = [t.to(dtype) if t.dtype == torch.float32 else t for t in tensors]
    return tuple(cast[first] for first in first_of_each(tensors))
