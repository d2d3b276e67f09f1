"""What a model costs on given devices and links: the planner's view of a job. A leaf: values with JSON both ways.

All times are for one microbatch. Whoever measures (`workers/profiling/profiler.py`), predicts or invents a profile,
says so in its `source`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

SCHEMA = 1
"""Version of the JSON form; another one is refused."""
Built = TypeVar("Built")
_PLAIN: Mapping[Any, type] = {"float": float, "int": int, "str": str}
"""Annotation of a field that holds no other value -> what JSON must bring for it."""


class ProfileError(ValueError):
    """A profile that cannot be planned with: what is wrong, where, and the way out."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One parameter whose gradient waits for the weight-gradient action."""

    name: str
    """Within the layer."""
    parameters: int
    """Scalars."""
    weight_grad_s: float
    """Its part of the layer's `weight_grad_s`."""
    shape: tuple[int, ...] = ()
    """Of the parameter."""
    scratch_bytes: int = 0
    """What its gradient is formed in before it is added; matrices of one shape on one rank share it."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, one microbatch. The last layer's times include the loss; the first's and the last's forward includes
    reading the batch."""

    name: str
    """Unique in the model."""
    forward_s: float
    """Forward pass (F); a recomputation (R) takes as long."""
    input_grad_s: float
    """Input gradient (I), with the gradients of the small parameters that autograd forms on the way."""
    weight_grad_s: float
    """Weight gradient (W): what freezing the whole layer saves. A full backward (B) is I plus W."""
    update_s: float
    """Gradient norm and optimizer update, once per step."""
    parameters: int
    """Scalars, trainable or not."""
    parameter_bytes: int
    """Weights, buffers, and the casts of weights that a lower precision keeps."""
    gradient_bytes: int
    """Gradients, kept from the first weight gradient of a step on."""
    optimizer_bytes: int
    """Optimizer state."""
    activation_bytes: int
    """What the layer keeps of one microbatch from its forward to its input gradient: storages that autograd or the
    deferral hold, counted once each; weights are not among them, nor what a layer before it keeps: its input is, in the
    model's first layer only. A stage's first layer keeps `input_bytes` more."""
    input_bytes: int
    """Its inputs: what a layer that recomputes keeps instead."""
    weight_grad_hold_bytes: int
    """What is held of one microbatch between its input gradient and its weight gradient: the matrices' inputs and the
    gradients of their outputs."""
    boundary_bytes: int
    """Its outputs: the message to the next stage, if the model is cut behind this layer."""
    boundary_grad_bytes: int
    """The gradient of those outputs that carry one: the message back."""
    statistics_bytes: int = 0
    """What the job's method of freezing keeps of it, as part of its state. A job's, not a measurement's."""
    sample_bytes: int = 0
    """What the job's samples of the gradient's change keep of it from one step to the next. A job's too."""
    working_bytes: int = 0
    """The most that one of its actions takes beside what lives before or after it."""
    matrices: tuple[Matrix, ...] = ()
    """The parameters whose gradients W forms, in queue order."""
    uncovered: tuple[str, ...] = ()
    """Parameters whose gradient takes a second walk of the graph."""

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    @property
    def state_bytes(self) -> int:
        """Weights, optimizer state and freezing statistics: what moves when the layer does."""
        return self.parameter_bytes + self.optimizer_bytes + self.statistics_bytes


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The layers in order, and what their costs were measured with."""

    layers: tuple[LayerProfile, ...]
    """In order."""
    microbatch_size: int
    """Samples."""
    precision: str
    """`float32` or `bfloat16`."""
    threads: int
    """Torch threads per rank."""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """What else of the job its costs depend on, `section.key` of the spec -> value. A job whose spec says otherwise is
    refused; what is not named here is not compared."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Where one rank computes."""

    kind: str
    """`cpu`, `cuda` or `emulated`."""
    name: str
    """What its maker calls it."""
    memory_bytes: int
    """What the rank may use: its share of the host's memory, or of its GPU's."""
    machine: str = ""
    """Devices of one machine share it."""
    slowdown: float = 1.0
    """Factor on all of the model's times on this device."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one rank to another. A message of n bytes holds its sender's computation for
    `sender_s + n * sender_s_per_byte`, occupies the link for `n / bytes_per_s`, arrives `latency_s` after that, and
    holds its receiver for `receiver_s + n * receiver_s_per_byte` when it is taken in."""

    latency_s: float
    """From the end of the transfer to the arrival."""
    bytes_per_s: float
    """While the message occupies the link."""
    sender_s: float = 0.0
    """What any message holds its sender for."""
    sender_s_per_byte: float = 0.0
    """And what its size adds to that."""
    receiver_s: float = 0.0
    """What any message holds its receiver for."""
    receiver_s_per_byte: float = 0.0
    """And what its size adds to that."""

    def transfer_s(self, size_bytes: int) -> float:
        """From the begin of the transfer to its arrival, on an empty link."""
        return size_bytes / self.bytes_per_s + self.latency_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks' devices and the links between them."""

    devices: tuple[DeviceProfile, ...]
    """By rank."""
    links: tuple[tuple[Link | None, ...], ...]
    """`links[source][target]`; None on the diagonal. Measured: of up to 16 GPUs every pair; else neighbours, a pair
    within each machine and one between any two of up to 16 machines; on a single machine of CPUs only some neighbours.
    Inferred: on CPUs all pairs between the same two machines, or within one, have the median of those measured there;
    of more than 16 GPUs, so have the pairs that were not measured; machines of which no pair was measured have the
    slowest link that was."""
    commit_s: float = 0.0
    """The collective at the end of a step."""
    receives_ahead: int = 0
    """Messages of one direction and stage whose memory a receiver sets aside before they come."""

    @staticmethod
    def uniform(device: DeviceProfile, ranks: int, link: Link, *, commit_s: float = 0.0) -> Cluster:
        """`ranks` equal devices, all linked alike."""
        return Cluster(
            devices=(device,) * ranks,
            links=tuple(tuple(None if a == b else link for b in range(ranks)) for a in range(ranks)),
            commit_s=commit_s,
        )

    def link(self, source: int, target: int) -> Link:
        link = self.links[source][target]
        assert link is not None, f"rank {source} has no link to itself"
        return link


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a cluster."""

    model: ModelProfile
    """What its layers cost."""
    cluster: Cluster
    """What they were measured on, and what messages cost there."""
    key: str
    """Hash of what the measurement depends on; see `orchestrator/prepare/profiling.py`."""
    source: str
    """Where the numbers come from, in words: `measured on ...`, `emulated`, a file."""

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str, *, where: str = "the profile") -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ProfileError: no JSON, another schema, or a field that is missing, unknown, negative, NaN, or a time of
                zero where none can be.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"{where} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ProfileError(f"{where} has not schema {SCHEMA}; make it anew with freshet profile")
        model = _section(data, "model", where)
        layers = _list(model, "layers", f"{where}: model")
        if not layers:
            raise ProfileError(f"{where}: model.layers is empty; a model has at least one layer")
        if "settings" in model:
            model["settings"] = _section(model, "settings", f"{where}: model")
        cluster = _section(data, "cluster", where)
        devices = [
            _build(DeviceProfile, device, f"{where}: device of rank {rank}")
            for rank, device in enumerate(_list(cluster, "devices", f"{where}: cluster"))
        ]
        if not devices:
            raise ProfileError(f"{where}: cluster.devices is empty; a job has at least one rank")
        rows = _list(cluster, "links", f"{where}: cluster")
        if len(rows) != len(devices) or any(not isinstance(r, list) or len(r) != len(rows) for r in rows):
            raise ProfileError(
                f"{where}: cluster.links must hold one link per pair of its {len(devices)} devices"
            )
        links = tuple(
            tuple(
                None if source == target else _build(Link, link, f"{where}: link {source} -> {target}")
                for target, link in enumerate(row)
            )
            for source, row in enumerate(rows)
        )
        built = tuple(_layer(layer, f"{where}: layer {index}") for index, layer in enumerate(layers))
        return _build(
            Profile,
            {
                **data,
                "model": _build(ModelProfile, {**model, "layers": built}, f"{where}: model"),
                "cluster": _build(
                    Cluster, {**cluster, "devices": tuple(devices), "links": links}, f"{where}: cluster"
                ),
            },
            where,
        )


def _layer(data: Any, where: str) -> LayerProfile:
    if not isinstance(data, dict):
        raise ProfileError(f"{where} is no table of fields")
    name = data.get("name")
    where = f"{where} ({name})" if name else where
    given = {name: _list(data, name, where) for name in ("matrices", "uncovered") if name in data}
    matrices = tuple(
        _matrix(matrix, f"{where}: matrix {number}")
        for number, matrix in enumerate(given.get("matrices", ()))
    )
    uncovered = tuple(_checked("uncovered", name, str, where) for name in given.get("uncovered", ()))
    return _build(LayerProfile, {**data, "matrices": matrices, "uncovered": uncovered}, where)


def _matrix(data: Any, where: str) -> Matrix:
    if isinstance(data, dict) and "shape" in data:
        data = {
            **data,
            "shape": tuple(_checked("shape", size, int, where) for size in _list(data, "shape", where)),
        }
    return _build(Matrix, data, where)


def _section(data: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    if not isinstance(data.get(name), dict):
        raise ProfileError(f"{where} has no section {name}")
    return dict(data[name])


def _list(data: Mapping[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(data.get(name), list):
        raise ProfileError(f"{where} has no list {name}")
    return data[name]


def _build(kind: type[Built], data: Any, where: str) -> Built:
    if not isinstance(data, dict):
        raise ProfileError(f"{where} is no table of fields")
    known = {one.name for one in fields(kind)}  # pyright: ignore[reportArgumentType]
    for name in data:
        if name not in known:
            raise ProfileError(f"{where}: unknown field {name}; known: {', '.join(sorted(known))}")
    for one in fields(kind):  # pyright: ignore[reportArgumentType]
        if one.type in _PLAIN and one.name in data:
            _checked(one.name, data[one.name], _PLAIN[one.type], where)
    try:
        return kind(**data)
    except TypeError as error:
        missing = sorted(known - data.keys())
        raise ProfileError(
            f"{where} lacks {', '.join(missing) or error}; make it with freshet profile"
        ) from None


def _checked(name: str, value: Any, kind: type, where: str) -> Any:
    """`value`, if a field of this name and kind may have it."""
    if kind is str:
        if not isinstance(value, str):
            raise ProfileError(f"{where}: {name} is {value}; it must be text")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        text = str(value) if len(str(value)) <= 40 else f"{str(value)[:40]}…"
        raise ProfileError(f"{where}: {name} is {text}; a measured number is finite")
    if kind is int and not isinstance(value, int):
        raise ProfileError(f"{where}: {name} is {value}; it must be a whole number")
    if value < 0:
        raise ProfileError(f"{where}: {name} is {value}, below zero; measure again")
    positive = name in ("bytes_per_s", "slowdown", "memory_bytes", "microbatch_size", "threads")
    if value == 0 and (positive or name == "forward_s"):
        raise ProfileError(f"{where}: {name} is 0; it must be more, measure again")
    return value


def _is_finite(value: int | float) -> bool:
    """Whether it is, also as a float: JSON knows integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
