"""The manifest of a checkpoint: what it holds and which files belong to it, with strict JSON both ways.

The JSON carries its own sha256, so that any altered value is detected. Touches no file, knows no tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from planner.codec import from_json, json_values
from planner.course import Leg
from workers.checkpoint.storage import join, split
from workers.protocol.carried import Carried
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.goals import PastValidation
from workers.protocol.loss_scale import LossScale

FORMAT = 8
"""Version of the checkpoint format that this code writes. It reads version 7 too, in which no layer's own files are
shared; version 6, which moreover has no frozen `prefix`; version 5, which moreover has the `metrics` of its own step in
place of all validations; version 4, which has neither these nor files beside its checkpoints; version 3, whose `spec`
moreover has the keys of `_FLAT` beside its sections; version 2, which has no `log_sha256` either; and version 1, in
which moreover `bfloat16` was the name of what is `bfloat16-autocast` now."""
_FLAT: Mapping[str, tuple[str, ...]] = {
    "job": (
        *("seed", "steps", "precision", "threads", "compile", "output"),
        *("validate_every", "timeline_every", "curvature_every", "sample_tokens"),
    ),
    "pipeline": ("microbatch_size", "microbatches", "replicas"),
    "cluster": ("device", "emulated", "pin_cores"),
}
"""Section -> its keys that stood outside it before version 4."""

_LAYER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file that several checkpoints of a job share, beside them: tensors that training does not change."""

    SUFFIX: ClassVar[str] = ".safetensors"
    bytes: int
    sha256: str
    """Hex, over the entire file, which has its name."""

    @property
    def name(self) -> str:
        return f"{self.sha256}{self.SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    name: str
    bytes: int
    sha256: str
    """Hex, over the entire file."""
    kept: KeptFile | None = None
    """The other tensors of a file of weights, where training changes only some."""
    shared: bool = False
    """Whether it lies among the kept files, under its sha256, for all checkpoints that have the same: that of a frozen
    layer."""
    written_bytes: int = field(default=0, compare=False)
    """Bytes that were written for this checkpoint: none for what was there. A manifest does not tell."""

    @property
    def kept_files(self) -> tuple[KeptFile, ...]:
        """The files that it shares with other checkpoints."""
        own = (KeptFile(bytes=self.bytes, sha256=self.sha256),) if self.shared else ()
        return own if self.kept is None else (*own, self.kept)

    @property
    def told(self) -> list[int | str]:
        """The record without its name, as commit records carry it."""
        kept = (self.kept.bytes, self.kept.sha256) if self.kept else ()
        return [self.bytes, self.sha256, int(self.shared), self.written_bytes, *kept]

    @staticmethod
    def heard(name: str, told: Sequence[int | str]) -> FileRecord:
        """The record of which `told` is told."""
        size, sha256, shared, written, *kept = told
        return FileRecord(
            name=name,
            bytes=int(size),
            sha256=str(sha256),
            kept=KeptFile(bytes=int(kept[0]), sha256=str(kept[1])) if kept else None,
            shared=bool(shared),
            written_bytes=int(written),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except its tensors."""

    format: int = FORMAT
    step: int
    """Steps committed."""
    generation: int
    """Number of the generation that wrote it."""
    spec: Mapping[str, Any]
    """The resolved spec: JSON values."""
    plan: Mapping[str, Any]
    """The plan that was in force: JSON values. Resuming may use another."""
    layers: tuple[str, ...]
    """Names of the model's layers, in order."""
    samples: int
    """Data position: training samples consumed."""
    files: Mapping[str, FileRecord]
    """File name -> record, two files per layer."""
    carried: Carried = field(default_factory=Carried)
    """State besides layers that the next step follows."""
    log_sha256: str | None = None
    """Hash of a line of the job's event log, written before this manifest: the newest one that its writer knew of; None
    if it knew none. As long as the checkpoint is there, neither that line nor one before it can change unnoticed."""
    validations: tuple[PastValidation, ...] = ()
    """The job's validations up to its step, with what of their loss and metrics is finite."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Loss and metrics of the validation after its step; empty without one."""
        return next((each.values for each in self.validations if each.step == self.step), {})

    def to_json(self) -> str:
        """The text of `manifest.json`. Raises ValueError or TypeError if spec or plan are not JSON values."""
        scale = self.carried.loss_scale
        given = {
            "format": self.format,
            "step": self.step,
            "generation": self.generation,
            "spec": self.spec,
            "plan": self.plan,
            "layers": list(self.layers),
            "samples": self.samples,
            "loss_scale": None if scale is None else scale.to_json(),
            "prefix": self.carried.prefix.to_json(),
            **({"legs": list(map(json_values, self.carried.legs))} if self.carried.legs else {}),
            "log_sha256": self.log_sha256,
            "validations": [[each.step, dict(each.values)] for each in self.validations],
            "files": {name: _fields(record) for name, record in self.files.items()},
        }
        # The checksum covers what a reader will see: by then every key is a string and every tuple a list.
        fields = json.loads(json.dumps(given, allow_nan=False))
        return json.dumps({**fields, "sha256": _checksum(fields)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            ValueError: it is not JSON, of another format, altered, or a field is missing, unknown or wrong.
                The message continues a sentence that begins with the file's name.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError("is not a JSON object")
        if fields.get("format") not in range(1, FORMAT + 1):
            raise ValueError(
                f"is of format {fields.get('format')!r}, where this version reads formats 1 to {FORMAT}"
            )
        if fields.pop("sha256", None) != _checksum(fields):
            raise ValueError("was altered: its values do not have the sha256 that it states")
        if fields["format"] == 1:
            fields.setdefault("loss_scale", None)
        if fields["format"] < 3:
            fields.setdefault("log_sha256", None)
        if fields["format"] < 6:
            own = fields.pop("metrics", {})
            fields.setdefault("validations", [[fields.get("step"), own]] if own else [])
        if fields["format"] < 7:
            fields.setdefault("prefix", FrozenPrefix().to_json())
        legs = fields.pop("legs", [])
        _check_types(fields)
        if fields["format"] == 1 and fields["spec"].get("precision") == "bfloat16":
            fields["spec"]["precision"] = "bfloat16-autocast"
        if fields["format"] < 4:
            fields["spec"] = _in_sections(fields["spec"])
        layers = tuple(fields["layers"])
        read = {
            "layers": layers,
            "carried": Carried(
                loss_scale=LossScale.from_json(fields.pop("loss_scale")),
                prefix=FrozenPrefix.from_json(fields.pop("prefix")),
                legs=_legs(legs),
            ),
            "validations": tuple(map(_validation, fields["validations"])),
            "files": _records(fields["files"], layers),
        }
        return Manifest(**{**fields, **read})


def checkpoint_folder(output: str, step: int, generation: int) -> str:
    """Location of the checkpoint of `step` in the job folder `output`."""
    return join(join(output, "checkpoints"), f"step-{step:08d}-gen-{generation}")


def kept_folder(folder: str) -> str:
    """Location of the files that the checkpoint at `folder` shares with others of its job."""
    return join(split(folder)[0], "kept")


def layer_files(layer: int, name: str) -> tuple[str, str]:
    """Names of a layer's two files: its weights and buffers, and the rest of its state."""
    return f"{layer:03d}-{name}.weights.safetensors", f"{layer:03d}-{name}.state.safetensors"


def _validation(told: Any) -> PastValidation:
    match told:
        case [int(step), dict(values)] if all(isinstance(value, int | float) for value in values.values()):
            return PastValidation(step=step, values={name: float(value) for name, value in values.items()})
        case _:
            raise ValueError(f"has a wrong validation: {str(told)[:80]}")


def _legs(told: Any) -> tuple[Leg, ...]:
    if not isinstance(told, list):
        raise ValueError(f"has wrong legs: {str(told)[:80]}")
    try:
        return tuple(from_json(Leg, json.dumps(leg)) for leg in told)
    except ValueError as error:
        raise ValueError(f"has a wrong leg: {error}") from error


def _checksum(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _in_sections(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A spec of before version 4 as sections."""
    moved = {key for keys in _FLAT.values() for key in keys}
    sections = {key: value for key, value in flat.items() if key not in moved}
    for section, keys in _FLAT.items():
        sections[section] = {key: flat[key] for key in keys if key in flat}
    return {**sections, "job": {"compile": False, "name": flat.get("job", ""), **sections["job"]}}


_TYPES: Mapping[str, type] = {
    "format": int,
    "step": int,
    "generation": int,
    "spec": dict,
    "plan": dict,
    "layers": list,
    "samples": int,
    "files": dict,
    "validations": list,
    "prefix": dict,
}


def _check_types(fields: Mapping[str, Any]) -> None:
    expected = {*_TYPES, "loss_scale", "log_sha256"}
    if fields.keys() != expected:
        odd = ", ".join(sorted(fields.keys() ^ expected))
        raise ValueError(f"has missing or unknown fields: {odd}")
    for name, kind in _TYPES.items():
        if type(fields[name]) is not kind or (kind is int and fields[name] < 0):
            raise ValueError(f"has a wrong {name}: {str(fields[name])[:80]}")
    head = fields["log_sha256"]
    if head is not None and not (isinstance(head, str) and _SHA256.fullmatch(head)):
        raise ValueError(f"has a wrong log_sha256: {str(head)[:80]}")
    layers = fields["layers"]
    # File names are made from these: none may lead out of the folder.
    if not all(isinstance(name, str) and _LAYER_NAME.fullmatch(name) for name in layers):
        raise ValueError("has a layer name with other characters than letters, digits, _ and -")
    if len(set(layers)) != len(layers):
        raise ValueError("names a layer twice")


def _fields(record: FileRecord) -> dict[str, Any]:
    told: dict[str, Any] = {"bytes": record.bytes, "sha256": record.sha256}
    if record.kept is not None:
        told["kept"] = {"bytes": record.kept.bytes, "sha256": record.kept.sha256}
    return {**told, "shared": True} if record.shared else told


def _records(files: Mapping[str, Any], layers: tuple[str, ...]) -> dict[str, FileRecord]:
    expected = {file for layer, name in enumerate(layers) for file in layer_files(layer, name)}
    if files.keys() != expected:
        raise ValueError(
            f"lists other files than its layers have: {', '.join(sorted(files.keys() ^ expected))}"
        )
    records: dict[str, FileRecord] = {}
    for name, record in files.items():
        told = dict(record) if isinstance(record, dict) else {}
        kept, shared = told.pop("kept", None), told.pop("shared", False)
        of_kept = None if kept is None else _size_and_digest(kept)
        own = _size_and_digest(told)
        if own is None or (kept is not None and of_kept is None) or not isinstance(shared, bool):
            raise ValueError(f"has a wrong record of {name}")
        records[name] = FileRecord(
            name=name,
            bytes=own[0],
            sha256=own[1],
            kept=None if of_kept is None else KeptFile(bytes=of_kept[0], sha256=of_kept[1]),
            shared=shared,
        )
    return records


def _size_and_digest(record: Any) -> tuple[int, str] | None:
    """None where `record` is no record of a file; file names are made of digests."""
    match record:
        case {"bytes": int(size), "sha256": str(sha256), **rest} if not rest and _SHA256.fullmatch(sha256):
            return size, sha256
        case _:
            return None
