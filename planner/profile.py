"""The cost of a model on given devices and links: the planner's view of a job. A leaf: values with JSON both ways.

All times are for one microbatch. `source` says whether a profile was measured (`workers/profiling/profiler.py`),
predicted or invented.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from planner.freezing import statistics_scalars

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Size = TypeVar("Size", float, "NDArray[np.float64]")
"""Bytes of one message, or of many as an array."""
SCHEMA = 2
"""Version of the JSON form; other versions are refused."""
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""A number in quotes or an unknown field is an error."""
_POSITIVE = ("bytes_per_s", "slowdown", "memory_bytes", "microbatch_size", "threads")
"""Fields that must be above 0; no number may be below 0."""


class ProfileError(ValueError):
    """An unusable profile. The message says what is wrong, where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One parameter whose gradient waits for the weight-gradient action."""

    __pydantic_config__ = _STRICT

    name: str
    """Within the layer."""
    parameters: int
    """Scalars."""
    weight_grad_s: float
    """Part of the layer's `weight_grad_s`."""
    shape: tuple[int, ...] = ()
    """Shape of the parameter."""
    scratch_bytes: int = 0
    """Buffer in which its gradient is computed before it is added; matrices of one shape on one rank share it."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, one microbatch. The times of the last layer include the loss. The forwards of the first and the last
    layer include reading the batch."""

    __pydantic_config__ = _STRICT

    name: str
    """Unique in the model."""
    forward_s: float
    """Forward pass (F); a recompute (R) takes as long."""
    input_grad_s: float
    """Input gradient (I), with the gradients of the small parameters that autograd computes along the way."""
    weight_grad_s: float
    """Weight gradient (W): the time that freezing the whole layer saves. A full backward (B) is I plus W."""
    update_s: float
    """Gradient norm and optimizer update, once per step."""
    parameters: int
    """Scalars, trainable or not."""
    parameter_bytes: int
    """Weights, buffers, and their casts."""
    gradient_bytes: int
    """Gradients, from the first weight gradient of a step on."""
    optimizer_bytes: int
    """Optimizer state."""
    activation_bytes: int
    """Memory that the layer keeps of one microbatch from its forward to its input gradient: the storages that autograd
    or the deferral hold, each counted once. Weights and what a layer before it keeps do not count; the input counts in
    the model's first layer only. The first layer of a stage keeps `input_bytes` more."""
    input_bytes: int
    """Its inputs: all that a layer keeps if it recomputes."""
    weight_grad_hold_bytes: int
    """Memory that the layer holds of one microbatch between its input gradient and its weight gradient: the inputs of
    its matrices and the gradients of their outputs."""
    boundary_bytes: int
    """Its outputs: the message to the next stage, if a stage ends with this layer."""
    boundary_grad_bytes: int
    """The gradient of those outputs that have one: the message back."""
    loss_bytes: int = 0
    """Part of `activation_bytes` of the last layer: the outputs, the targets and what else the loss keeps until its
    backward, whether or not the layer recomputes."""
    loss_input_bytes: int = 0
    """Part of `loss_bytes`: the outputs, which a recompute makes a second time."""
    cast_bytes: int = 0
    """Part of `parameter_bytes`: weights in the lower precision, which are made anew where the layer moves to."""
    statistics_bytes: int = 0
    """Statistics of the job's freezing method, as part of the layer's state. From the job, not measured."""
    sample_bytes: int = 0
    """Samples of the gradient's change that the job keeps from one step to the next. From the job, not measured."""
    working_bytes: int = 0
    """The most memory that its input gradient needs in addition to what lives before or after it."""
    forward_working_bytes: int | None = None
    """The same for a forward pass; None: as much as the input gradient."""
    backward_working_bytes: int | None = None
    """The same for a backward pass that forms the weight gradients at once; None: as much as the input gradient."""
    matrices: tuple[Matrix, ...] = ()
    """The parameters whose gradients W computes, in queue order."""
    uncovered: tuple[str, ...] = ()
    """Parameters whose gradient needs a second traversal of the graph."""
    whole: str = ""
    """Why plain autograd forms all its gradients, at once, in the backward pass; empty: W forms those of `matrices`."""
    trained: tuple[int, ...] = ()
    """Scalars of each parameter that it trains, in the order in which they lie in memory: where shards may be cut.
    Empty: not known."""
    tied_from: int | None = None
    """The first of the layers with which it shares parameters, directly or through others; None: it shares none."""
    frozen: bool = False
    """Whether it is frozen as a whole: it has no backward pass and sends no gradients. From the job, not measured."""
    released: bool = False
    """Whether it is frozen for good, and has no memory for gradients. From the job, not measured."""
    kept_s: float = 0.0
    """Time of its forward pass on any stage but the first, which keeps its outputs and computes none. From the job, not
    measured."""

    @property
    def exchanged_bytes(self) -> int:
        """Gradients that a step sends to other replicas and to copies."""
        return 0 if self.frozen else self.gradient_bytes

    @property
    def summed_bytes(self) -> int:
        """Gradients that a rank has memory for."""
        return 0 if self.released else self.gradient_bytes

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    def kept_by(self, method: str) -> int:
        """Bytes of the numbers that a freezing method keeps of the parameters that the layer trains."""
        # Where their sizes are not known, one parameter is as large as all of them: gradients have 32 bits.
        sizes = self.trained or (self.gradient_bytes // 4,)
        return 4 * sum(statistics_scalars(method, scalars) for scalars in sizes)

    @property
    def state_bytes(self) -> int:
        """Weights, optimizer state and freezing statistics."""
        return self.parameter_bytes + self.optimizer_bytes + self.statistics_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that are sent when the layer moves."""
        return self.state_bytes - self.cast_bytes


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The layers in order, and the settings of their measurement."""

    __pydantic_config__ = _STRICT

    layers: tuple[LayerProfile, ...]
    """In order."""
    microbatch_size: int
    """Samples."""
    precision: str
    """`float32`, `bfloat16`, `bfloat16-autocast` or `float16`."""
    threads: int
    """Torch threads per rank."""
    checked: bool = False
    """Whether each layer was compared with plain autograd before it was measured."""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """The other settings on which the costs depend: `section.key` of the spec -> value. A job whose spec differs is
    refused; settings that are not listed are not compared."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The device of one rank."""

    __pydantic_config__ = _STRICT

    kind: str
    """`cpu`, `cuda` or `emulated`."""
    name: str
    """The name that its maker gives it."""
    memory_bytes: int
    """The memory that the rank may use: its share of the host's or of its GPU's."""
    machine: str = ""
    """Devices of one machine share it."""
    slowdown: float = 1.0
    """Factor on all of the model's times on this device."""
    stream_s_per_byte: float | None = None
    """Compute time that a CPU loses per byte of layer state that leaves or arrives meanwhile. The median over ranks, of
    states that go to another machine if there is one. None: not measured."""
    socket_s_per_byte: float | None = None
    """The same of a message, beside what it holds its sender and its receiver."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link from one rank to another, and the cost of a message over it.

    A message of n bytes holds its sender's computation for `sender_s + n * sender_s_per_byte`, occupies the link for
    `n / bytes_per_s`, arrives `latency_s` after that, and holds its receiver for
    `receiver_s + n * receiver_s_per_byte` when the receiver takes it in."""

    __pydantic_config__ = _STRICT

    latency_s: float
    """From the end of the transfer to the arrival."""
    bytes_per_s: float
    """While the message occupies the link."""
    sender_s: float = 0.0
    """Time for which any message holds its sender."""
    sender_s_per_byte: float = 0.0
    """And what its size adds to that."""
    receiver_s: float = 0.0
    """Time for which any message holds its receiver."""
    receiver_s_per_byte: float = 0.0
    """And what its size adds to that."""

    @staticmethod
    def slowest(links: Collection[Link]) -> Link:
        """A link with the lowest bandwidth and the highest latency of `links`, which holds neither end."""
        return Link(
            latency_s=max(link.latency_s for link in links),
            bytes_per_s=min(link.bytes_per_s for link in links),
        )

    def sender_busy_s(self, size_bytes: Size, messages: float = 1) -> Size:
        """Time for which `messages` messages of `size_bytes` together hold their sender."""
        return messages * self.sender_s + size_bytes * self.sender_s_per_byte

    def link_busy_s(self, size_bytes: Size) -> Size:
        """Time for which a message occupies the link."""
        return size_bytes / self.bytes_per_s

    def receiver_busy_s(self, size_bytes: Size, messages: float = 1) -> Size:
        """Time for which `messages` messages of `size_bytes` together hold their receiver."""
        return messages * self.receiver_s + size_bytes * self.receiver_s_per_byte

    def transfer_s(self, size_bytes: Size) -> Size:
        """From the start of the transfer to its arrival, on an idle link."""
        return self.link_busy_s(size_bytes) + self.latency_s

    def total_s(self, size_bytes: float) -> float:
        """From the start of sending until the receiver has taken in the message, on an idle link."""
        return self.sender_busy_s(size_bytes) + self.transfer_s(size_bytes) + self.receiver_busy_s(size_bytes)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks' devices and the links between them."""

    __pydantic_config__ = _STRICT

    devices: tuple[DeviceProfile, ...]
    """By rank."""
    links: tuple[tuple[Link | None, ...], ...]
    """`links[source][target]`; None on the diagonal. The measurement takes every pair of up to 16 GPUs. Otherwise it
    takes neighbours, one pair within each machine and one between any two of up to 16 machines; on a single machine of
    CPUs, only some neighbours. On CPUs, all pairs between the same two machines, or within one, get the median of the
    pairs measured there; with more than 16 GPUs, so do the pairs that were not measured. Two machines without a
    measured pair get the slowest measured link."""
    commit_s: float = 0.0
    """The collective at the end of a step."""
    sends_kept: int = 0
    """The most sent messages that a rank keeps in memory, over all streams. With the next message it frees all but half
    of them."""
    receives_ahead: int = 0
    """Messages of one direction and stage for which a receiver allocates memory before they arrive."""
    refresh_every: int = 0
    """Steps after which a standby in host memory gets a new base; 0: standbys are kept on the devices. The job's spec
    determines it, not the measurement."""

    @staticmethod
    def uniform(device: DeviceProfile, ranks: int, link: Link, *, commit_s: float = 0.0) -> Cluster:
        """`ranks` equal devices with equal links."""
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
class Noise:
    """Disturbance of a measurement, where it was worst."""

    __pydantic_config__ = _STRICT

    others: float
    """Share of a machine's processors that was busy with anything else than the measuring ranks, in [0, 1]."""
    spread: float
    """Interquartile range of a rank's repeats over their median."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a cluster."""

    __pydantic_config__ = _STRICT

    model: ModelProfile
    """The cost of its layers."""
    cluster: Cluster
    """The devices of the measurement, and the cost of messages between them."""
    key: str
    """Hash of everything on which the measurement depends; see `orchestrator/prepare/profiling.py`."""
    source: str
    """Where the numbers come from, as text: `measured on ...`, `emulated`, a file."""
    measured_s: float | None = None
    """When it was measured, in seconds since the Unix epoch; None: unknown, or not measured."""
    noise: Noise | None = None
    """Disturbance of the measurement of its layers; None: unknown, or not measured."""

    def frozen_by(self, method: str) -> Profile:
        """The profile with what a freezing method keeps of each layer."""
        layers = tuple(replace(layer, statistics_bytes=layer.kept_by(method)) for layer in self.model.layers)
        return replace(self, model=replace(self.model, layers=layers))

    def with_prefix(self, layers: int, released: int = 0, kept: int = 0) -> Profile:
        """The profile while the first `layers` layers are frozen as a whole: they have no backward pass and no update,
        and send no gradients.

        Args:
            released: layers among them that are never trained again, and keep neither activations nor gradients; the
                memory of the others stays what they take once they are.
            kept: layers among them whose outputs the first stage keeps, as far as it has them.
        """
        if not layers:
            return self
        of = self.model.layers
        trained = {layer.tied_from for layer in of[layers:] if layer.tied_from is not None}
        still = {"input_grad_s": 0.0, "weight_grad_s": 0.0}
        freed = {
            "activation_bytes": 0,
            "input_bytes": 0,
            "weight_grad_hold_bytes": 0,
            "boundary_grad_bytes": 0,
        }

        def frozen(number: int, layer: LayerProfile) -> LayerProfile:
            found = replace(layer, **still, **(freed if number < released else {}))
            if number == layers - 1 < released:  # the layer above keeps what it hands on
                found = replace(found, activation_bytes=layer.boundary_bytes)
            if number < kept:
                found = replace(found, forward_s=0.0, kept_s=layer.forward_s)
            if layer.tied_from in trained:  # the other uses of its parameters train them
                return found
            return replace(found, update_s=0.0, frozen=True, released=number < released)

        changed = tuple(frozen(n, layer) if n < layers else layer for n, layer in enumerate(of))
        return replace(self, model=replace(self.model, layers=changed))

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str, *, where: str = "the profile") -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ProfileError: the text is not JSON or of another schema; a field is missing, unknown, negative, NaN, or
                zero where it must be more.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"{where} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ProfileError(f"{where} is not of schema {SCHEMA}; measure it again with freshet profile")
        try:
            # As JSON: strict validation accepts JSON arrays as tuples, but not Python lists.
            profile = _adapter().validate_json(json.dumps(data))
        except ValidationError as error:
            raise ProfileError(_in_words(error.errors(include_url=False), data, where)) from None
        for problem in _problems(profile, where):
            raise ProfileError(problem)
        return profile


@cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)


def _in_words(errors: Sequence[ErrorDetails], data: Any, where: str) -> str:
    """The first of `errors` as text; for missing fields, all that the same table lacks."""
    first = errors[0]
    *table, name = first["loc"] or ("",)
    place, value = _place(tuple(table), data, where), first["input"]
    kind = first["type"]
    if kind == "missing":
        lacking = [str(e["loc"][-1]) for e in errors if e["type"] == kind and list(e["loc"][:-1]) == table]
        return f"{place} lacks {', '.join(sorted(lacking))}; make it with freshet profile"
    if kind == "unexpected_keyword_argument":
        return f"{place}: unknown field {name}; it is none of a profile of schema {SCHEMA}"
    if kind == "dataclass_type":
        return f"{_place(first['loc'], data, where)} is no table of fields"
    if isinstance(name, int):
        # The error is in an element of a list of plain values.
        place, name = _place(tuple(table[:-1]), data, where), table[-1]
    needed = {
        "string_type": "it must be text",
        "dict_type": "it must be a table of values",
        "tuple_type": "it must be a list",
    }.get(kind)
    if needed is None:
        finite = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        needed = "it must be a whole number" if finite else "a measured number is finite"
    text = str(value) if len(str(value)) <= 40 else f"{str(value)[:40]}…"
    return f"{place}: {name} is {text}; {needed}"


def _place(path: tuple[int | str, ...], data: Any, where: str) -> str:
    """The place in the profile to which `path` leads, as text."""
    match path:
        case ("model", "layers", int(number), *rest):
            layer = data["model"]["layers"][number]
            name = layer.get("name") if isinstance(layer, dict) else None
            place = f"{where}: layer {number}{f' ({name})' if name else ''}"
            return f"{place}: matrix {rest[1]}" if rest[:1] == ["matrices"] and len(rest) > 1 else place
        case ("cluster", "devices", int(rank), *_):
            return f"{where}: device of rank {rank}"
        case ("cluster", "links", int(source), int(target), *_):
            return f"{where}: link {source} -> {target}"
        case ():
            return where
        case _:
            return f"{where}: {'.'.join(map(str, path))}"


def _problems(profile: Profile, where: str) -> Iterator[str]:
    """Problems that types do not check: empty lists, missing or excess links, numbers out of range."""
    layers, devices, links = profile.model.layers, profile.cluster.devices, profile.cluster.links
    if not layers:
        yield f"{where}: model.layers is empty; a model has at least one layer"
    if not devices:
        yield f"{where}: cluster.devices is empty; a job has at least one rank"
    if len(links) != len(devices) or any(len(row) != len(devices) for row in links):
        yield f"{where}: cluster.links must hold one link per pair of its {len(devices)} devices"
    for source, row in enumerate(links):
        for target, link in enumerate(row):
            if (link is None) != (source == target):
                wrong = "must be null" if source == target else "is no table of fields"
                yield f"{where}: link {source} -> {target} {wrong}"
    for path, value in _numbers((), profile):
        if not _is_finite(value):
            wrong = f"{str(value)[:40]}…; a measured number is finite"
        elif value < 0:
            wrong = f"{value}, below zero; measure again"
        elif value == 0 and path[-1] in _POSITIVE:
            wrong = f"{value}; it must be more, measure again"
        else:
            continue
        yield f"{_place(path[:-1], asdict(profile), where)}: {path[-1]} is {wrong}"


def _numbers(path: tuple[int | str, ...], value: Any) -> Iterator[tuple[tuple[int | str, ...], int | float]]:
    """Every number in the fields of `value`, with its path."""
    if isinstance(value, int | float):
        yield path, value
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _numbers((*path, number), each)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _numbers((*path, one.name), getattr(value, one.name))


def _is_finite(value: int | float) -> bool:
    """Whether `value` is finite as a float: JSON has integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
