"""Files of the interference model: windows and forest as arrays in safetensors, with a checksum. No pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from planner.features import NAMES, VERSION
from planner.interference.dataset import DatasetError, Windows
from planner.interference.forest import Forest

FORMAT = 1
FORESTS, WINDOWS = "freshet interference forest", "freshet interference windows"


class ModelFileError(ValueError):
    """A file of windows or of a model cannot be used; says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredForest:
    """A forest and where it comes from."""

    forest: Forest
    machine: str
    """Of the machine on which its windows were measured."""
    made: str
    """Date, as YYYY-MM-DD."""


def save_forest(path: Path, stored: StoredForest) -> None:
    """Write `stored` to `path`."""
    forest = stored.forest
    arrays = {name: getattr(forest, name) for name in _ARRAYS}
    _write(path, FORESTS, arrays, {"machine": stored.machine, "made": stored.made})


def load_forest(path: Path) -> StoredForest:
    """Read a forest.

    Raises:
        ModelFileError: there is none, it was altered, or it has other features than this program.
    """
    arrays, told = _read(path, FORESTS, "`freshet interference fit`")
    try:
        forest = Forest(**{name: arrays[name] for name in _ARRAYS}, columns=len(NAMES))
    except (KeyError, ValueError) as error:
        raise ModelFileError(f"{path} holds no forest: {error}") from None
    return StoredForest(forest=forest, machine=str(told["machine"]), made=str(told["made"]))


def save_windows(path: Path, windows: Windows, machine: str) -> None:
    """Write measured windows to `path`."""
    told = {"machine": machine, "kinds": list(windows.kinds), "levels": list(windows.levels)}
    _write(path, WINDOWS, {"rows": windows.rows, "ratios": windows.ratios}, told)


def load_windows(path: Path) -> tuple[Windows, str]:
    """Read windows, and the machine on which they were measured.

    Raises:
        ModelFileError: there are none, they were altered, or they have other features than this program.
    """
    arrays, told = _read(path, WINDOWS, "`freshet interference collect`")
    try:
        windows = Windows(
            rows=arrays["rows"],
            ratios=arrays["ratios"],
            kinds=tuple(map(str, told["kinds"])),
            levels=tuple(map(str, told["levels"])),
        )
    except (KeyError, DatasetError) as error:
        raise ModelFileError(f"{path} holds no windows: {error}") from None
    return windows, str(told["machine"])


_ARRAYS = ("roots", "left", "right", "feature", "threshold", "missing_left", "value")


def _write(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]], told: Mapping[str, Any]) -> None:
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    head = {"kind": kind, "format": FORMAT, "features": VERSION, "names": list(NAMES), **told}
    text = json.dumps(head, sort_keys=True)
    metadata = {"head": text, "sha256": _checksum(text, kept)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(save(kept, metadata=metadata))
    partial.replace(path)


def _read(path: Path, kind: str, maker: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    again = f"make another one with {maker}"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelFileError(f"there is no {path}: {again}") from None
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path} is no safetensors file ({error}): {again}") from None
    text = metadata.get("head", "")
    try:
        head = json.loads(text)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("kind") != kind or head.get("format") != FORMAT:
        raise ModelFileError(f"{path} is not what {maker} writes: {again}")
    if _checksum(text, arrays) != metadata.get("sha256"):
        raise ModelFileError(f"{path} was altered or damaged: its checksum is another one; {again}")
    if head.get("features") != VERSION or head.get("names") != list(NAMES):
        raise ModelFileError(
            f"{path} has features of version {head.get('features')}, this program those of {VERSION}: {again}"
        )
    return arrays, head


def _checksum(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
