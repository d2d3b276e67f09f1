"""Form of what a layer hands on of one sample, and the bytes of the samples of a microbatch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.process.pinned_memory import to_host
from workers.reproducibility.canonical import CHANNELS_LAST, has_channels_last, in_memory_order


@dataclass(frozen=True)
class RowForm:
    """Form of one sample's row of each tensor: dtype, shape, and whether it is an image whose channels lie last."""

    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> RowForm:
        """The form of canonical tensors, each [B, ...]."""
        return RowForm(tuple((t.dtype, tuple(t.shape[1:]), has_channels_last(t)) for t in tensors))

    def to_json(self) -> str:
        return json.dumps([[str(dtype).removeprefix("torch."), *rest] for dtype, *rest in self.tensors])

    @staticmethod
    def from_json(text: str) -> RowForm:
        """The form that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        tensors: list[tuple[torch.dtype, tuple[int, ...], bool]] = []
        for entry in json.loads(text):
            match entry:
                case [str(name), list(shape), bool(last)] if all(isinstance(n, int) and n > 0 for n in shape):
                    dtype = getattr(torch, name, None)
                    if isinstance(dtype, torch.dtype) and (not last or len(shape) + 1 in CHANNELS_LAST):
                        tensors.append((dtype, tuple(shape), last))
                        continue
            raise ValueError(f"{entry!r} is no form of a tensor")
        return RowForm(tuple(tensors))

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample's rows."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape, _ in self.tensors)

    def empty(self, rows: int) -> tuple[Tensor, ...]:
        """Fresh canonical tensors of the host for `rows` samples, with undefined content."""
        return tuple(
            torch.empty(
                (rows, *shape),
                dtype=dtype,
                memory_format=CHANNELS_LAST[len(shape) + 1] if last else torch.contiguous_format,
            )
            for dtype, shape, last in self.tensors
        )


def why_not_by_rows(tensors: Sequence[Tensor], rows: int) -> str:
    """Why `tensors` are no rows of `rows` samples; empty if they are."""
    for number, tensor in enumerate(tensors):
        if not tensor.dim() or tensor.shape[0] != rows or not tensor.numel():
            return f"tensor {number} has the shape {list(tensor.shape)}, and not a row for each of {rows} samples"
    return ""


def rows_of(tensors: Sequence[Tensor]) -> list[list[memoryview]]:
    """Per sample, the bytes of its row of each of the canonical tensors [B, ...]. Those of the host are views."""
    parts = [
        in_memory_order(to_host(tensor)).view(torch.uint8).view(tensor.shape[0], -1).numpy()
        for tensor in tensors
    ]
    return [[memoryview(part[row]) for part in parts] for row in range(tensors[0].shape[0])]
