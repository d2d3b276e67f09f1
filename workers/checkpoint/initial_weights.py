"""Weights to start from: one safetensors file with the keys that `freshet export` writes, `layer.tensor`, or a
checkpoint of another run.

A rank reads those of its own layers only: of a file tensor by tensor, of a checkpoint layer by layer. Knows no rank;
unpickles nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.checkpoint.folder import (
    DamagedCheckpointError,
    checkpoints,
    manifest_sha256,
    read_manifest,
    read_weights_and_buffers,
)
from workers.protocol.errors import JobError
from workers.protocol.orders import CheckpointRef
from workers.state.layer_state import LayerState, ParameterRef

Shapes = Mapping[str, tuple[int, ...]]
"""Key -> shape."""

NAMED = 5
"""Keys of a kind that an error names; it counts the others."""
IN_MEMORY = 2
"""Layers that share a parameter are compared."""


class _Held(Protocol):
    """Tensors by key."""

    def keys(self) -> Iterable[str]: ...

    def holds(self, key: str) -> bool: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def tensor(self, key: str) -> Tensor: ...


class _OfFile:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._keys = frozenset(file.keys())

    def keys(self) -> Iterable[str]:
        return self._keys

    def holds(self, key: str) -> bool:
        return key in self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        return self._file.get_tensor(key)


class _OfCheckpoint:
    """Tensors of a checkpoint, of which `IN_MEMORY` layers are in memory."""

    def __init__(self, path: str) -> None:
        self._ref = CheckpointRef(path=path, step=0)
        self._manifest = read_manifest(self._ref)
        self._layers: dict[str, Mapping[str, Tensor]] = {}

    def keys(self) -> Iterable[str]:
        return (f"{name}.{key}" for name in self._manifest.layers for key in self._of(name))

    def holds(self, key: str) -> bool:
        layer, _, name = key.partition(".")
        return layer in self._manifest.layers and name in self._of(layer)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensor(key).shape)

    def tensor(self, key: str) -> Tensor:
        layer, _, name = key.partition(".")
        return self._of(layer)[name]

    def _of(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._layers:
            for old in [*self._layers][: 1 - IN_MEMORY]:
                del self._layers[old]
            number = self._manifest.layers.index(name)
            self._layers[name] = read_weights_and_buffers(self._ref, self._manifest, number)
        return self._layers[name]


def pinned(path: str) -> tuple[str, str | None]:
    """The file that `model.weights` names, or the checkpoint: of the folder of a run its newest one.

    Returns:
        Its path, and of a checkpoint the sha256 (hex) of its manifest, which tells that of all its files.

    Raises:
        JobError: it is neither.
    """
    if _is_file(path):
        return path, None
    if "://" not in path and not os.path.exists(path):
        raise JobError(
            f"model.weights = {path!r} does not exist: name a safetensors file, or the folder of a run"
        )
    try:
        newest = next((ref.path for ref in checkpoints(path)), path)
        sha256 = manifest_sha256(CheckpointRef(path=newest, step=0))
    except (DamagedCheckpointError, OSError, ValueError) as error:
        raise JobError(
            f"model.weights = {path!r} is neither a safetensors file, named so, nor the folder of a run with a"
            f" checkpoint, nor a checkpoint: {error}"
        ) from error
    return newest, sha256


def read_weights(path: str, states: Sequence[LayerState]) -> None:
    """Set weights and buffers of `states` to what a file, or a checkpoint, holds of these layers, in the dtype that
    they have.

    Raises:
        JobError: it cannot be read, or it lacks a tensor or has it in another shape.
    """
    with _opened(path) as held:
        for state in states:
            own = {f"{state.name}.{name}": t for name, t in (*state.weights.items(), *state.buffers.items())}
            found = {key: held.shape(key) for key in own if held.holds(key)}
            _compare(path, {key: tuple(tensor.shape) for key, tensor in own.items()}, found)
            with torch.no_grad():
                for key, tensor in own.items():
                    tensor.copy_(held.tensor(key))
            state.recast()


def read_fixed(path: str, states: Sequence[LayerState]) -> None:
    """Set the fixed parameters of `states` to what the file holds of them, as `read_weights` does."""
    fixed = [replace(state, weights=state.fixed, buffers={}) for state in states if state.fixed]
    if fixed:
        read_weights(path, fixed)


def check_weights(path: str, shapes: Shapes, ties: Sequence[Sequence[ParameterRef]]) -> None:
    """Check that a file, or a checkpoint, holds the whole model, and nothing else.

    Args:
        shapes: of every tensor that the model's layers save.

    Raises:
        JobError: it cannot be read; its keys, its shapes or its tied parameters do not fit the model.
    """
    with _opened(path) as held:
        _compare(path, shapes, {key: held.shape(key) for key in held.keys()})  # noqa: SIM118
        for first, *others in ties:
            for other in others:
                if not torch.equal(held.tensor(str(first)), held.tensor(str(other))):
                    raise JobError(
                        f"model.weights = {path!r}: the model ties {first} and {other}, and their values differ there"
                    )


def _is_file(path: str) -> bool:
    return path.endswith(".safetensors") or os.path.isfile(path)


@contextmanager
def _opened(path: str) -> Iterator[_Held]:
    if not _is_file(path):
        try:
            yield _OfCheckpoint(path)
        except DamagedCheckpointError as error:
            raise JobError(
                f"model.weights = {path!r} cannot be read: {error}. Its run may have deleted it since: name another"
                " one, or a file that `freshet export` wrote"
            ) from error
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield _OfFile(file)
    except (SafetensorError, OSError) as error:
        raise JobError(
            f"model.weights = {path!r} cannot be read: {error}. It must be a safetensors file on a file system that"
            " every node sees; `freshet export` writes one"
        ) from error


def _compare(path: str, expected: Shapes, found: Shapes) -> None:
    """Raises JobError where the file does not hold what is expected."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    shaped = [
        f"{key} is {list(found[key])} and {list(shape)} in the model"
        for key, shape in expected.items()
        if key in found and found[key] != shape
    ]
    problems = [
        f"it {verb} {_first(keys)}" for verb, keys in (("lacks", missing), ("also holds", unexpected)) if keys
    ]
    if shaped:
        problems.append(_first(shaped))
    if any(".lora_" in key for key in unexpected):
        problems.append(
            "they are of a run that trained adapters: keep its model.lora, or export it with --merge and name that"
            " folder in model.path"
        )
    if problems:
        raise JobError(
            f"model.weights = {path!r} does not fit the model: {'; '.join(problems)}. Use the [model] settings that the"
            " weights were made with; keys are layer.parameter, as `freshet export` writes them"
        )


def _first(texts: Sequence[str]) -> str:
    rest = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
