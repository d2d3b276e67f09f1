"""Serializes a `LayerState` to a header and chunks, and loads it into fresh allocations. Knows no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from planner.shards import Shard
from workers.state.layer_state import FixedFile, LayerState
from workers.state.stored_moments import StoredMoments

Chunk = bytes | memoryview

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def header(state: LayerState, step: int) -> bytes:
    """Describes the chunks of `state`, as JSON.

    Raises:
        ValueError: a tensor's dtype is not supported.
    """
    tensors = [
        [group, name, slot, _dtype(name, tensor), list(tensor.shape)]
        for group, name, slot, tensor in _tensors(state)
    ]
    return json.dumps(
        {
            "layer": state.layer,
            "name": state.name,
            "shard": state.shard,
            "step": step,
            "tensors": tensors,
            "slots": list(state.slots),
            "updates": state.updates,
            "fixed": sorted(state.fixed_names),
            "fixed_file": [state.fixed_file.bytes, state.fixed_file.sha256],
            "stored": None if state.stored is None else vars(state.stored),
        }
    ).encode()


def chunks(state: LayerState, chunk_bytes: Callable[[], int]) -> Iterator[Chunk]:
    """The bytes of all tensors of `state`, in the header's order. Tensors on a GPU are copied chunk by chunk.

    Args:
        chunk_bytes: gives the size of the next chunk; the last one may be smaller.
    """
    parts: list[memoryview] = []
    room = chunk_bytes()
    for _, _, _, tensor in _tensors(state):
        flat = _flat(tensor.detach().contiguous())
        start = 0
        while start < flat.numel():
            piece = flat[start : start + room].cpu().numpy().data
            parts.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield parts[0] if len(parts) == 1 else b"".join(parts)
                parts, room = [], chunk_bytes()
    if parts:
        yield b"".join(parts)


class PartialState:
    """A `LayerState` being filled from its chunks.

    Args:
        header: the output of `header`.

    Raises:
        ValueError: it is not such a header.
    """

    def __init__(self, header: bytes | bytearray) -> None:
        try:
            about: dict[str, Any] = json.loads(header)
            self.step = int(about["step"])
            number, of = about["shard"]
            fixed_bytes, fixed_sha256 = about["fixed_file"]
            self.state = LayerState(
                layer=int(about["layer"]),
                name=str(about["name"]),
                weights={},
                buffers={},
                slots={str(parameter): {} for parameter in about["slots"]},
                updates={str(name): int(count) for name, count in about["updates"].items()},
                shard=Shard(int(number), int(of)),
                fixed_names=frozenset(map(str, about["fixed"])),
                fixed_file=FixedFile(int(fixed_bytes), str(fixed_sha256)),
                stored=None if about["stored"] is None else StoredMoments(**about["stored"]),
            )
            views = [self._allocate(*entry) for entry in about["tensors"]]
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"not the header of a layer's state: {error!r}") from error
        self._rest = [view for view in views if len(view)]
        self._rest.reverse()
        self.bytes = sum(map(len, self._rest))
        self.missing_bytes = self.bytes

    def _allocate(self, group: str, name: str, slot: str, dtype: str, shape: list[int]) -> memoryview:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        if group == "slots":
            self.state.slots[name][slot] = tensor
        else:
            {
                "weights": self.state.weights,
                "buffers": self.state.buffers,
                "freezing": self.state.freezing,
            }[group][name] = tensor
        return _flat(tensor).numpy().data

    def load(self, chunk: bytes | bytearray | memoryview) -> None:
        """Copy the next chunk into its place.

        Raises:
            ValueError: it is empty, or exceeds the remaining space.
        """
        if not 0 < len(chunk) <= self.missing_bytes:
            raise ValueError(f"a chunk of {len(chunk)} bytes, where {self.missing_bytes} were missing")
        self.missing_bytes -= len(chunk)
        source = memoryview(chunk)
        while source:
            view = self._rest.pop()
            size = min(len(view), len(source))
            view[:size] = source[:size]
            source = source[size:]
            if size < len(view):
                self._rest.append(view[size:])


def _tensors(state: LayerState) -> Iterator[tuple[str, str, str, Tensor]]:
    """(group, name, slot or "", tensor) of every tensor."""
    for group, tensors in (
        ("weights", state.weights),
        ("buffers", state.buffers),
        ("freezing", state.freezing),
    ):
        for name, tensor in tensors.items():
            yield group, name, "", tensor
    for name, slots in state.slots.items():
        for slot, tensor in slots.items():
            yield "slots", name, slot, tensor


def _flat(tensor: Tensor) -> Tensor:
    """uint8[bytes] over the memory of `tensor`."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _dtype(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, which state streams do not carry")
    return dtype
