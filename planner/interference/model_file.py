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
from safetensors import SafetensorError
from safetensors.numpy import load, save

from planner.features import NAMES, VERSION
from planner.interference.dataset import DatasetError, Windows
from planner.interference.forest import Forest
from planner.interference.judgement import Judgement, judgement_from

FORMAT = 3
CPU = "cpu"
"""The device of files that name none."""
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
    judgement: Judgement
    """How good it is."""
    device: str = CPU
    """What its stages ran on: `cpu` or `cuda`. It says nothing about others."""


@dataclass(frozen=True, kw_only=True)
class StoredWindows:
    """Measured windows and where they come from."""

    windows: Windows
    machine: str
    """On which they were measured."""
    warnings: tuple[str, ...] = ()
    """What makes them less trustworthy, in words."""
    device: str = CPU
    """What their stages ran on: `cpu` or `cuda`."""


def forest_bytes(stored: StoredForest) -> bytes:
    """`stored` as the content of a file, for `forest_from`."""
    arrays = {name: getattr(stored.forest, name) for name in _ARRAYS}
    told = {
        "machine": stored.machine,
        "device": stored.device,
        "made": stored.made,
        "judgement": stored.judgement.to_dict(),
    }
    return _content(FORESTS, arrays, told)


def forest_from(content: bytes, where: str) -> StoredForest:
    """The forest in `content`, of the file `where`.

    Raises:
        ModelFileError: it is none, was altered, or has other features than this program.
    """
    return _forest(content, where, CPU)


def _forest(content: bytes, where: str, device: str) -> StoredForest:
    arrays, told = _parsed(content, where, FORESTS, _command("fit", device))
    try:
        forest = Forest(**{name: arrays[name] for name in _ARRAYS}, columns=len(NAMES))
        judgement = judgement_from(told["judgement"])
        return StoredForest(
            forest=forest,
            machine=told["machine"],
            made=told["made"],
            judgement=judgement,
            device=str(told.get("device", CPU)),
        )
    except (KeyError, ValueError) as error:
        raise ModelFileError(f"{where} holds no forest: {error}") from None


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
        windows = Windows(
            rows=arrays["rows"],
            ratios=arrays["ratios"],
            kinds=tuple(map(str, told["kinds"])),
            levels=tuple(map(str, told["levels"])),
        )
        return StoredWindows(
            windows=windows,
            machine=str(told["machine"]),
            warnings=tuple(map(str, told["warnings"])),
            device=str(told.get("device", CPU)),
        )
    except (KeyError, DatasetError) as error:
        raise ModelFileError(f"{path} holds no windows: {error}") from None


_ARRAYS = ("roots", "left", "right", "feature", "threshold", "missing_left", "value")


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
    """Of a safetensors file, which begins with the length of its JSON header."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})


def _checksum(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
