"""Weights of a model that transformers saved: safetensors in one file, or in shards with an index.

Tensors are read one by one, so that a rank reads those of its own layers only. Unpickles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from workers.models.huggingface.architecture import Model, SourceLayer
from workers.models.huggingface.library import model_keys
from workers.protocol.errors import JobError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Source:
    """The tensors in a model's folder."""

    def __init__(self, folder: Path, model: Model) -> None:
        self._folder, self._model = folder, model

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, str]]:
        """Name in the model of transformers -> its file, and its name there.

        Raises:
            JobError: the folder holds no safetensors, or a shard is missing or broken.
        """
        files = _files(self._folder)
        renamed = model_keys(self._model.module, self._model.name, self._model.config, sorted(files))
        return {renamed[key]: (file, key) for key, file in files.items()}

    def keys(self) -> frozenset[str]:
        """The tensors that it holds, by their names in the model of transformers."""
        return frozenset(self._places)

    @torch.no_grad()
    def fill(self, layer: SourceLayer, module: nn.Module) -> list[Tensor]:
        """Set parameters and buffers of a layer's module to what the folder holds of them, in the dtype that they have.

        Returns:
            Those that it holds.

        Raises:
            JobError: a file cannot be read, or holds one in another shape.
        """
        filled: list[Tensor] = []
        persistent = module.state_dict(keep_vars=True)
        for name, tensor in persistent.items():
            place = self._places.get(layer.source_key(name))
            if place is None:
                continue
            file, key = place
            with _opened(self._folder / file) as tensors:
                shape = tensors.get_slice(key).get_shape()
                if list(tensor.shape) != list(shape):
                    raise JobError(
                        f"{key} in {self._folder / file} is {list(shape)} and {list(tensor.shape)} in the model of its"
                        " config.json: they do not belong together"
                    )
                tensor.copy_(tensors.get_tensor(key))
            filled.append(tensor)
        return filled


def _files(folder: Path) -> dict[str, str]:
    """Name of each tensor in `folder` -> its file.

    Raises:
        JobError: there is none, or a file of the index is missing.
    """
    index = folder / INDEX
    if index.exists():
        try:
            found = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobError(f"{index} cannot be read ({error}): fetch it again") from error
        if missing := sorted({name for name in found.values() if not (folder / name).exists()}):
            raise JobError(f"{folder} lacks {missing[0]}, which its index names: fetch it again")
        return found
    if not (folder / SINGLE).exists():
        pickled = sorted(each.name for each in folder.glob("*.bin"))
        hint = (
            f"it holds {pickled[0]}, which is pickled: load it with transformers and save_pretrained it, which writes"
            " safetensors"
            if pickled
            else "save the model there with save_pretrained, or set model.pretrained = false to begin with drawn"
            " weights"
        )
        raise JobError(f"{folder} holds neither {SINGLE} nor {INDEX}: {hint}")
    with _opened(folder / SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), SINGLE)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise JobError(f"{path} cannot be read as safetensors ({error}): fetch it again") from error
