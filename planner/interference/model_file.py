"""Files of the interference model: windows and forest as arrays in safetensors, with a checksum. No pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from planner.features import NAMES, VERSION
from planner.interference.dataset import Windows
from planner.interference.forest import Forest
from planner.interference.judgement import Judgement
from planner.wording import counted

FORMAT = 3
CPU: Final = "cpu"
"""The device of files that name none."""
FORESTS, WINDOWS = "freshet interference forest", "freshet interference windows"


class ModelFileError(ValueError):
    """A file of windows or of a model cannot be used; says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredForest:
    """A forest and where it comes from."""

    forest: Forest
    machine: str
    """Name of the machine on which its windows were measured."""
    made: str
    """Date, as YYYY-MM-DD."""
    judgement: Judgement
    """Quality of the forest."""
    device: str = CPU
    """Device of its stages: `cpu` or `cuda`. The forest says nothing about others."""


@dataclass(frozen=True, kw_only=True)
class StoredWindows:
    """Measured windows and where they come from."""

    windows: Windows
    machine: str
    """Name of the machine on which they were measured."""
    warnings: tuple[str, ...] = ()
    """Reasons to trust them less, in words."""
    device: str = CPU
    """Device of their stages: `cpu` or `cuda`."""


def forest_bytes(stored: StoredForest) -> bytes:
    """`stored` as the content of a file, for `forest_from`."""
    arrays = {name: getattr(stored.forest, name) for name in _ARRAYS}
    told = {
        "machine": stored.machine,
        "device": stored.device,
        "made": stored.made,
        "judgement": asdict(stored.judgement),
    }
    return _content(FORESTS, arrays, told)


def forest_from(content: bytes, where: str) -> StoredForest:
    """The forest in `content`, of the file `where`.

    Raises:
        ModelFileError: it is none, was altered, or has other features than this program.
    """
    return _forest(content, where, CPU)


def _forest(content: bytes, where: str, device: str) -> StoredForest:
    maker = _command("fit", device)
    arrays, told = _parsed(content, where, FORESTS, maker)
    try:
        head = _head(_ForestHead, told)
        if not head.judgement.scores:
            raise ValueError("no model was judged")
        return StoredForest(
            forest=Forest(**_checked(arrays, _ARRAYS), columns=len(NAMES)),
            machine=head.machine,
            made=head.made,
            judgement=head.judgement,
            device=head.device,
        )
    except ValueError as error:
        raise ModelFileError(f"{where} holds no forest: {error}; make another one with {maker}") from None


def save_forest(path: Path, stored: StoredForest) -> None:
    """Write `stored` to `path`."""
    _write(path, forest_bytes(stored))


def load_forest(path: Path, device: str = CPU) -> StoredForest:
    """Read a forest.

    Args:
        device: for which an error says how to make one.

    Raises:
        ModelFileError: there is none, it was altered, or it has other features than this program.
    """
    return _forest(_read(path, _command("fit", device)), str(path), device)


def save_windows(path: Path, stored: StoredWindows) -> None:
    """Write measured windows to `path`."""
    windows = stored.windows
    told = {
        "machine": stored.machine,
        "device": stored.device,
        "warnings": list(stored.warnings),
        "kinds": list(windows.kinds),
        "levels": list(windows.levels),
    }
    _write(path, _content(WINDOWS, {"rows": windows.rows, "ratios": windows.ratios}, told))


def load_windows(path: Path, device: str = CPU) -> StoredWindows:
    """Read windows.

    Args:
        device: for which an error says how to measure some.

    Raises:
        ModelFileError: there are none, they were altered, or they have other features than this program.
    """
    maker = _command("collect", device)
    arrays, told = _parsed(_read(path, maker), str(path), WINDOWS, maker)
    try:
        head = _head(_WindowsHead, told)
        found = _checked(arrays, _WINDOW_ARRAYS)
        windows = Windows(rows=found["rows"], ratios=found["ratios"], kinds=head.kinds, levels=head.levels)
        return StoredWindows(
            windows=windows, machine=head.machine, warnings=head.warnings, device=head.device
        )
    except ValueError as error:
        raise ModelFileError(f"{path} holds no windows: {error}; make others with {maker}") from None


_LIST, _TABLE = 1, 2
"""Dimensions of an array."""
_ARRAYS = {
    "roots": (np.int32, _LIST),
    "left": (np.int32, _LIST),
    "right": (np.int32, _LIST),
    "feature": (np.int32, _LIST),
    "threshold": (np.float64, _LIST),
    "missing_left": (np.bool_, _LIST),
    "value": (np.float64, _LIST),
}
"""Arrays of a forest: name -> type of its numbers, dimensions."""
_WINDOW_ARRAYS = {"rows": (np.float64, _TABLE), "ratios": (np.float64, _LIST)}


@dataclass(frozen=True, kw_only=True)
class _ForestHead:
    """The header of a forest's file, beside what all headers have."""

    machine: str
    made: str
    judgement: Judgement
    device: Literal["cpu", "cuda"] = CPU


@dataclass(frozen=True, kw_only=True)
class _WindowsHead:
    """The header of a file of windows, beside what all headers have."""

    machine: str
    warnings: tuple[str, ...]
    kinds: tuple[str, ...]
    levels: tuple[str, ...]
    device: Literal["cpu", "cuda"] = CPU


Head = TypeVar("Head", _ForestHead, _WindowsHead)


def _head(kind: type[Head], told: Mapping[str, Any]) -> Head:
    """The header in `told`.

    Raises:
        ValueError: a value is missing or of another type.
    """
    try:
        # As JSON: strict validation accepts JSON arrays as tuples, but not Python lists.
        return TypeAdapter(kind).validate_json(json.dumps(told), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"its header's {place}: {first['msg']}") from None


def _checked(
    arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, tuple[type[np.generic], int]]
) -> dict[str, NDArray[Any]]:
    """The arrays of these names.

    Raises:
        ValueError: one is missing, of another type, or has another number of dimensions.
    """
    for name, (kind, dimensions) in expected.items():
        if name not in arrays:
            raise ValueError(f"it lacks the array {name}")
        found = arrays[name]
        if found.dtype != kind or found.ndim != dimensions:
            raise ValueError(
                f"its array {name} is {found.dtype} of shape {found.shape}; expected {kind.__name__} of"
                f" {counted(dimensions, 'dimension')}"
            )
    return {name: arrays[name] for name in expected}


def _content(kind: str, arrays: Mapping[str, NDArray[Any]], told: Mapping[str, Any]) -> bytes:
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    head = {"kind": kind, "format": FORMAT, "features": VERSION, "names": list(NAMES), **told}
    text = json.dumps(head, sort_keys=True)
    return save(kept, metadata={"head": text, "sha256": _checksum(text, kept)})


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _command(name: str, device: str) -> str:
    """The command that makes a file for `device`, in words."""
    return f"`freshet interference {name}{'' if device == CPU else f' --device {device}'}`"


def _read(path: Path, maker: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelFileError(f"there is no {path}: make one with {maker}") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from None


def _parsed(
    content: bytes, where: str, kind: str, maker: str
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    again = f"make another one with {maker}"
    try:
        arrays = load(content)
    except SafetensorError as error:
        raise ModelFileError(f"{where} is no safetensors file ({error}): {again}") from None
    metadata = _metadata(content)
    text = metadata.get("head", "")
    try:
        head = json.loads(text)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("kind") != kind or head.get("format") != FORMAT:
        raise ModelFileError(f"{where} is not what {maker} writes: {again}")
    if _checksum(text, arrays) != metadata.get("sha256"):
        raise ModelFileError(f"{where} was altered or damaged: its checksum is another one; {again}")
    if head.get("features") != VERSION or head.get("names") != list(NAMES):
        raise ModelFileError(
            f"{where} has features of version {head.get('features')}, this program those of {VERSION}: {again}"
        )
    return arrays, head


def _metadata(content: bytes) -> dict[str, str]:
    """Metadata of a safetensors file, which begins with the length of its JSON header."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})


def _checksum(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
