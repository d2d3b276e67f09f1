"""Parameters and buffers that a layer's state can hold: dense, and each in memory of its own.

A state writes, copies and moves every tensor by itself. What two of them share would come apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workers.protocol.errors import JobError


def unfold_(module: nn.Module) -> None:
    """Give the module's buffers memory that they fill, as those do not that `expand` makes, every other element of
    another, or a conjugate that is not worked out."""
    known: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and _is_folded(buffer):
                part._buffers[name] = known.setdefault(
                    id(buffer), buffer.resolve_conj().resolve_neg().contiguous()
                )


def check_memory(layer: str, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Check that the tensors of a layer are dense and share nothing.

    Raises:
        JobError: one is sparse, quantized or nested, or two share memory; names the layer and them.
    """
    tensors = {**parameters, **buffers}
    for name, tensor in tensors.items():
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else ""
        kind = kind or ("" if tensor.layout == torch.strided else "sparse")
        if kind:
            what = "parameter" if name in parameters else "buffer"
            raise JobError(
                f"layer {layer} has a {kind} {what} {name}, which its state cannot hold: hold dense tensors of which"
                " the forward pass makes it (indices and values; integers, scale and zero point)"
            )
    shared = _sharing(tensors)
    if shared is None:
        return
    one, other = shared
    if one in parameters and other in parameters:
        raise JobError(
            f"layer {layer} has parameters {one} and {other} that share memory, so that an update of one changes the"
            " other: make them one parameter with two names, or give each its own tensor"
        )
    first = "parameter" if one in parameters else "buffer"
    raise JobError(
        f"layer {layer} has a {first} {one} and a buffer {other} that share memory, so that a change of one changes the"
        " other, which moves and checkpoints do not follow: hold one, and take the other from it in the forward pass"
    )


def _sharing(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The names of two that have an element in common."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in by_storage.values():
        spans = sorted((*_span(tensors[name]), name) for name in names)
        before: list[tuple[int, str]] = []
        for begin, stop, name in spans:
            before = [(until, other) for until, other in before if until > begin]
            for _, other in before:
                if _meet(tensors[other], tensors[name]):
                    return (other, name) if names.index(other) < names.index(name) else (name, other)
            before.append((stop, name))
    return None


def share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    if not one.numel() or not other.numel() or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, stop), (first, last) = _span(one), _span(other)
    return begin < last and first < stop and _meet(one, other)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (last + 1) * tensor.element_size()


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage whose spans overlap have an element in common."""
    if one.dtype != other.dtype:
        return True
    base = min(int(one.storage_offset()), int(other.storage_offset()))
    most = max(_span(one)[1], _span(other)[1]) // one.element_size() - base
    taken = torch.zeros(most, dtype=torch.bool)
    _place(taken, one, base).fill_(True)
    return bool(_place(taken, other, base).any())


def _place(taken: Tensor, tensor: Tensor, base: int) -> Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return taken.as_strided(sizes, tensor.stride(), int(tensor.storage_offset()) - base)


def _is_folded(tensor: Tensor) -> bool:
    """Whether its elements lie in memory, but, in whatever order, are not all of their span."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return False
    if tensor.is_conj() or tensor.is_neg():
        return True
    begin, stop = _span(tensor)
    expanded = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return stop - begin != tensor.nbytes or expanded
