"""Weights to start from: one safetensors file with the keys that `freshet export` writes, `layer.tensor`.

Tensors are read one by one, so that a rank reads those of its own layers only. Knows no rank; unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workers.models.definition import ParameterRef
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState

Shapes = Mapping[str, tuple[int, ...]]
"""Key -> shape."""

NAMED = 5
"""Keys of a kind that an error names; it counts the others."""


def read_weights(path: str, states: Sequence[LayerState]) -> None:
    """Set weights and buffers of `states` to what the file holds of these layers, in the dtype that they have.

    Raises:
        JobError: the file cannot be read, or it lacks a tensor or has it in another shape.
    """
    with _opened(path) as file:
        held = set(file.keys())
        for state in states:
            own = {f"{state.name}.{name}": t for name, t in (*state.weights.items(), *state.buffers.items())}
            found = {key: tuple(file.get_slice(key).get_shape()) for key in own if key in held}
            _compare(path, {key: tuple(tensor.shape) for key, tensor in own.items()}, found)
            with torch.no_grad():
                for key, tensor in own.items():
                    tensor.copy_(file.get_tensor(key))
            state.recast()


def check_weights(path: str, shapes: Shapes, ties: Sequence[Sequence[ParameterRef]]) -> None:
    """Check that a file holds the whole model, and nothing else.

    Args:
        shapes: of every tensor that the model's layers save.

    Raises:
        JobError: the file cannot be read; its keys, its shapes or its tied parameters do not fit the model.
    """
    with _opened(path) as file:
        _compare(path, shapes, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
        for first, *others in ties:
            for other in others:
                if not torch.equal(file.get_tensor(str(first)), file.get_tensor(str(other))):
                    raise JobError(
                        f"model.weights = {path!r}: the model ties {first} and {other}, and their values differ there"
                    )


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
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
    if problems:
        raise JobError(
            f"model.weights = {path!r} does not fit the model: {'; '.join(problems)}. Use the [model] settings that the"
            " weights were made with; keys are layer.parameter, as `freshet export` writes them"
        )


def _first(texts: Sequence[str]) -> str:
    rest = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
