"""One layout for everything that crosses a layer boundary, cut or not.

Kernels choose their path, and with it the last bits, by strides and alignment. A tensor that arrives over the
network is a fresh contiguous allocation, so a tensor that stays on its rank must look the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, contiguous_format


def canonical(tensor: Tensor) -> Tensor:
    """`tensor` itself if it is laid out as a fresh allocation of its shape would be, else a copy that is."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        # Torch lets dimensions of size one have any stride. Checking them costs Python time, so only if there
        # are any.
        shape = tensor.shape
        if 1 not in shape or tensor.stride() == contiguous_strides(shape):
            return tensor
    return tensor.clone(memory_format=contiguous_format)


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
