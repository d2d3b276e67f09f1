"""The safetensors file of a layer's state without weights and buffers, and moments that lie there instead of in memory.
Knows no checkpoint and no job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from workers.protocol.errors import JobError

METADATA = "freshet"
"""The only key of a file's metadata: safetensors writes several in no fixed order, and equal states must give equal
files."""
FREEZING = "freezing:"
"""Prefix of freezing statistics, which are stored beside the optimizer's state; many jobs have none."""


class MomentsLost(JobError):
    """The file of a layer's moments cannot be read, and they are nowhere else."""


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """Content of such a file."""

    slots: dict[str, dict[str, Tensor]]
    """Trained parameter -> slot name -> optimizer state, as in `LayerState`."""
    updates: dict[str, int]
    """Trained parameter -> updates applied."""
    freezing: dict[str, Tensor] = field(default_factory=dict)
    """Freezing statistics."""

    @staticmethod
    def of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> StateFile:
        """The content of a file with these tensors and metadata."""
        slots: dict[str, dict[str, Tensor]] = {parameter: {} for parameter in about["updates"]}
        freezing: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if key.startswith(FREEZING):
                freezing[key.removeprefix(FREEZING)] = tensor
                continue
            slot, _, parameter = key.partition(".")
            slots[parameter][slot] = tensor
        return StateFile(slots=slots, updates=about["updates"], freezing=freezing)


def tensors_of(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a layer's file, and the metadata written with them.

    Raises:
        ValueError: it is no such file.
    """
    try:
        header_bytes = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"][METADATA])
        return load(data), about
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class StoredMoments:
    """Where the moments of a layer lie while nothing of it but its buffers changes."""

    path: str
    """The file, which a complete checkpoint of the job names."""
    bytes: int
    sha256: str
    """Hex, over the entire file."""
    statistics: str = ""
    """Digest of the freezing statistics in it (`digest_of`); empty: nobody has looked yet."""

    def read(self) -> StateFile:
        """The content of the file, in host memory.

        Raises:
            MomentsLost: it is missing, cannot be read, or was altered.
        """
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise self._lost(f"cannot be read: {error.strerror or error}") from error
        if len(data) != self.bytes or hashlib.sha256(data).hexdigest() != self.sha256:
            raise self._lost("was altered: it does not have the sha256 in its name")
        return StateFile.of(*tensors_of(data))

    def _lost(self, problem: str) -> MomentsLost:
        return MomentsLost(
            f"{self.path}, which has the moments of a layer that was frozen, {problem}. Put the file back, or resume"
            " the job from an earlier checkpoint"
        )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; each may be on any device."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    raw = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (left, right))
    return torch.equal(*raw)
