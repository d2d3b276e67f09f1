"""One layout for everything that crosses a layer boundary, cut or not.

Kernels choose their path, and with it speed and the last bits, by strides and alignment. A tensor that arrives over the
network is a fresh allocation, so a tensor that stays on its rank must look the same. An image whose channels lie last,
as convolutions leave it, is allocated so; every other tensor contiguously.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the format of a batch of such images."""


def canonical(tensor: Tensor) -> Tensor:
    """`tensor` itself if it is laid out as a fresh allocation of its shape and format would be, else a copy that is."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if has_channels_last(tensor):
        layout = CHANNELS_LAST[tensor.dim()]
        strides = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
        if tensor.stride() == strides and tensor.storage_offset() == 0:
            return tensor
        return tensor.clone(memory_format=layout)
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        # Torch lets dimensions of size one have any stride. Checking them costs Python time, so only if there
        # are any.
        shape = tensor.shape
        if 1 not in shape or tensor.stride() == contiguous_strides(shape):
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def has_channels_last(tensor: Tensor) -> bool:
    """Whether it is an image whose channels lie last in memory, and not contiguous as well."""
    layout = CHANNELS_LAST.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in one dimension, as they lie in what is allocated for a message of `tensor`. A view, if it is
    canonical."""
    return tensor.as_strided((tensor.numel(),), (1,)) if has_channels_last(tensor) else tensor.reshape(-1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a fresh contiguous tensor. Dimensions of size one have fixed strides too, though torch
    allows any: a matrix of one row must not look transposed."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def first_of_each(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Per tensor, the number of the first that is the very same one."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(id(tensor), number) for number, tensor in enumerate(tensors))
