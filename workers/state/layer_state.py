"""`LayerState`: everything of one layer that training changes, and the only definition of it.

Commit, standby, migration and checkpoint all use this value for a layer. It knows no network, no file and no
update rule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from safetensors.torch import save
from torch import Tensor, nn

from planner.shards import WHOLE, Shard
from workers.process.pinned_memory import parts_on_host
from workers.protocol.errors import JobError
from workers.protocol.orders import StatePart
from workers.reproducibility.digest import state_digest as state_digest
from workers.state.flat import Cut, Flat, flats_of
from workers.state.own_memory import check_memory
from workers.state.statistics import chosen, put_together
from workers.state.stored_moments import StoredMoments

Gradients = Mapping[str, Tensor]
"""One layer's gradients: parameter -> summed gradient, of its shape and dtype. An absent parameter was frozen
or not used."""


NO_CASTS: Mapping[str, torch.dtype] = {}

FIXED_METADATA = {"freshet": "{}"}
"""Metadata of the file of a layer's fixed parameters."""


class NamesSlots(Protocol):
    """Interface that a layer's state needs from an optimizer."""

    def slot_names(self) -> tuple[str, ...]:
        """Names of the tensors that it keeps for each parameter."""
        ...


@dataclass(frozen=True, order=True)
class ParameterRef:
    """A parameter (or persistent buffer) by layer and by its name within the layer."""

    layer: str
    parameter: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.parameter}"


@dataclass
class FixedFile:
    """The safetensors file that a layer's fixed parameters make; one object for all copies of a state, so that it is
    hashed and written once."""

    bytes: int = 0
    sha256: str = ""
    """Hex; empty: nobody has asked yet."""
    written: bool = False
    """Whether this process knows it to be in the job's folder, undamaged."""

    def same(self, other: FixedFile) -> bool:
        return (self.bytes, self.sha256) == (other.bytes, other.sha256)

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes with sha256 {self.sha256[:12]}" if self.sha256 else "none"


@dataclass
class LayerState:
    """One layer's weights, buffers and optimizer state. Its tensors are live (`of`) or copies on the host."""

    layer: int
    """Position in the model."""
    name: str
    """Name in the model, unique."""
    weights: dict[str, Tensor]
    """Parameter -> value. A parameter with several names in the module appears once, under the first."""
    buffers: dict[str, Tensor]
    """Persistent buffer -> value. Buffers that the module does not save are not state."""
    slots: dict[str, dict[str, Tensor]]
    """Trained parameter -> slot name -> optimizer state of the parameter's shape and dtype. A parameter that
    the model fixes (`requires_grad` is false) has none."""
    updates: dict[str, int]
    """Trained parameter -> updates applied so far: its own step count, which does not advance while it is
    frozen."""
    freezing: dict[str, Tensor] = field(default_factory=dict)
    """Freezing statistics, with the names and shapes of the job's freeze method; empty without one."""
    flats: tuple[Flat, ...] = ()
    """The buffers of which the trained weights and the slots are views, by dtype. A state that was received or read has
    none: its tensors lie anywhere."""
    shard: Shard = WHOLE
    """Shard that it holds, where siblings share out the layer's states: the trained parameters of that shard only, and
    all that training does not change."""
    elsewhere: frozenset[str] = frozenset()
    """Trained parameters that other shards have."""
    fixed_names: frozenset[str] = frozenset()
    """Parameters that training does not change."""
    fixed_file: FixedFile = field(default_factory=FixedFile, compare=False)
    """Result of `record_of_fixed`."""
    stored: StoredMoments | None = None
    """Where the optimizer state of a frozen layer lies instead of in memory: `slots` has none then."""

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The parameters that training does not change, as far as they are here."""
        return {name: tensor for name, tensor in self.weights.items() if name in self.fixed_names}

    @property
    def leaves_out(self) -> bool:
        """Whether fixed parameters are left out: `fixed_file` says which they are."""
        return not self.fixed_names <= self.weights.keys()

    @staticmethod
    def of(
        layer: int,
        name: str,
        module: nn.Module,
        optimizer: NamesSlots,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
    ) -> LayerState:
        """The live state of `module`: its own parameters and buffers, with fresh optimizer state of zeros. The
        parameters that it trains come to lie side by side.

        The buffers are the tensors that the module holds now. A module must write into them: if it assigns a
        new tensor, this state no longer follows.

        Args:
            casts: parameter -> dtype in which the module holds it from now on: its value here, which training changes,
                keeps the present one. `recast` follows a change.

        Raises:
            JobError: as `check_memory`.
        """
        parameters, buffers = saved_tensors(module)
        check_memory(name, parameters, buffers)
        trained = {key: weight for key, weight in parameters.items() if weight.requires_grad}
        flats = flats_of(trained, optimizer.slot_names(), casts)
        weights: dict[str, Tensor] = dict(parameters)
        for flat in flats:
            if flat.cast is not None:
                weights |= flat.layout.views(flat.weights)
        return LayerState(
            layer=layer,
            name=name,
            weights=weights,
            buffers=buffers,
            slots=slots_of(flats, trained),
            updates=dict.fromkeys(trained, 0),
            flats=flats,
            fixed_names=frozenset(parameters.keys() - trained.keys()),
        )

    def recast(self) -> None:
        """Have the module follow: weights have changed that it holds in another dtype."""
        for flat in self.flats:
            flat.recast()


def slots_of(flats: Sequence[Flat], names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Name -> slot -> its part of the flat buffers."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for flat in flats:
        for slot, buffer in flat.slots.items():
            for name, view in flat.layout.views(buffer).items():
                found[name][slot] = view
    return found


def saved_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The live weights and persistent buffers of `module` by name; each once, under its first name."""
    saved = module.state_dict().keys()
    buffers = {key: buffer for key, buffer in module.named_buffers() if key in saved}
    return dict(module.named_parameters()), buffers


def host_copy(state: LayerState) -> LayerState:
    """A copy of `state` in fresh, contiguous CPU allocations that shares no memory with `state`."""
    return _copied(state, fresh)


def as_it_is(state: LayerState) -> LayerState:
    """`state` of which only weights and optimizer state change with what changes them there: buffers, which a window
    changes too, statistics and counts are copies."""
    return replace(
        state,
        buffers={name: tensor.detach().clone() for name, tensor in state.buffers.items()},
        freezing={name: tensor.detach().clone() for name, tensor in state.freezing.items()},
        updates=dict(state.updates),
    )


def apart(state: LayerState) -> LayerState:
    """A copy of `state` on its device that shares no memory with `state`, nor with the module that computes with it."""
    return _copied(state, lambda tensor: tensor.detach().clone())


def apart_on(state: LayerState, device: torch.device) -> LayerState:
    """A copy of `state` on `device` that shares no memory with `state`."""
    return _copied(state, lambda tensor: tensor.detach().to(device, copy=True))


def without_module(state: LayerState) -> LayerState:
    """A live `state` without the module that computes with it: the same memory, but for casts."""
    flats = tuple(replace(flat, cast=None) for flat in state.flats)
    views = {name: view for flat in flats for name, view in flat.layout.views(flat.weights).items()}
    weights = {name: views.get(name, weight.detach()) for name, weight in state.weights.items()}
    return replace(state, weights=weights, flats=flats)


def _copied(state: LayerState, fresh: Callable[[Tensor], Tensor]) -> LayerState:
    flats = tuple(
        Flat(flat.layout, fresh(flat.weights), {slot: fresh(buffer) for slot, buffer in flat.slots.items()})
        for flat in state.flats
    )
    flat_weights = {name: view for flat in flats for name, view in flat.layout.views(flat.weights).items()}
    flat_slots = slots_of(flats, flat_weights)
    return LayerState(
        layer=state.layer,
        name=state.name,
        weights={
            name: flat_weights[name] if name in flat_weights else fresh(tensor)
            for name, tensor in state.weights.items()
        },
        buffers={name: fresh(tensor) for name, tensor in state.buffers.items()},
        slots={
            name: flat_slots[name]
            if name in flat_slots
            else {slot: fresh(tensor) for slot, tensor in slots.items()}
            for name, slots in state.slots.items()
        },
        updates=dict(state.updates),
        freezing={key: fresh(tensor) for key, tensor in state.freezing.items()},
        flats=flats,
        shard=state.shard,
        elsewhere=state.elsewhere,
        fixed_names=state.fixed_names,
        fixed_file=state.fixed_file,
        stored=state.stored,
    )


def leave_moments(state: LayerState, stored: StoredMoments) -> None:
    """Let go of the optimizer state, which lies in `stored`. Whoever reads a tensor of it keeps that."""
    state.stored = stored
    state.slots = {name: {} for name in state.slots}
    state.flats = tuple(replace(flat, slots={}) for flat in state.flats)


def with_moments(state: LayerState) -> LayerState:
    """`state` with its optimizer state in memory, and else the same tensors; `state` itself if it is there.

    Raises:
        MomentsLost: its file cannot be read.
    """
    if state.stored is None:
        return state
    read = state.stored.read().slots
    found = _with_zeros(state, {slot for of_one in read.values() for slot in of_one})
    for name, slots in read.items():
        for slot, tensor in sorted(slots.items()):
            if slot in found.slots[name]:
                found.slots[name][slot].copy_(tensor)
            else:  # no buffers: they lie anywhere
                found.slots[name][slot] = fresh(tensor)
    return found


def bring_moments_back(state: LayerState) -> None:
    """Have the optimizer state of the live `state` in memory again.

    Raises:
        MomentsLost: its file cannot be read.
    """
    _take_moments(state, with_moments(state))


def _take_moments(state: LayerState, other: LayerState) -> None:
    state.flats, state.slots, state.stored = other.flats, other.slots, other.stored


def _with_zeros(state: LayerState, slots: Iterable[str]) -> LayerState:
    """`state`, whose optimizer state is not in memory, with one of zeros."""
    names = sorted(slots)
    flats = tuple(
        replace(flat, slots={slot: torch.zeros_like(flat.weights) for slot in names}) for flat in state.flats
    )
    return replace(state, flats=flats, slots=slots_of(flats, state.slots), stored=None)


def shard_of(state: LayerState, cuts: Sequence[Cut], number: int, slots: Iterable[str]) -> LayerState:
    """One shard of the live `state` of a whole layer, with fresh optimizer state of zeros.

    Args:
        cuts: the layer's, by shard number.
        slots: what the optimizer keeps for each parameter.
    """
    cut, names = cuts[number], tuple(slots)
    flats = tuple(
        flat.part(elements, layout, names)
        for flat, elements, layout in zip(state.flats, cut.ranges, cut.layouts, strict=True)
    )
    elsewhere = state.updates.keys() - set(cut.names)
    weights = {name: weight for name, weight in state.weights.items() if name not in elsewhere}
    for flat in flats:
        if flat.cast is not None:
            weights |= flat.layout.views(flat.weights)
    return replace(
        state,
        weights=weights,
        slots=slots_of(flats, cut.names),
        updates=dict.fromkeys(cut.names, 0),
        flats=flats,
        shard=Shard(number, len(cuts)),
        elsewhere=frozenset(elsewhere),
    )


def whole_of(shards: Sequence[LayerState]) -> LayerState:
    """The layer that `shards` make up, with the same tensors.

    Raises:
        JobError: they are not all shards of one layer.
    """
    first = shards[0]
    all_of = [(first.name, Shard(number, first.shard.of)) for number in range(first.shard.of)]
    here = sorted((each.name, each.shard) for each in shards)
    if here != all_of:
        raise JobError(f"layer {first.layer} ({first.name}) is made of {all_of}, but here are {here}")
    return LayerState(
        layer=first.layer,
        name=first.name,
        weights={name: weight for each in shards for name, weight in each.weights.items()},
        buffers=first.buffers,
        slots={name: slots for each in shards for name, slots in each.slots.items()},
        updates={name: count for each in shards for name, count in each.updates.items()},
        freezing=put_together([(each.freezing, _scalars(each)) for each in shards]),
        fixed_names=frozenset[str]().union(*(each.fixed_names for each in shards)),
        fixed_file=next((each.fixed_file for each in shards if each.fixed_names), first.fixed_file),
    )


def part_of(state: LayerState, part: StatePart) -> LayerState:
    """The `part` of `state`, with the same tensors; the rest is empty."""
    weights, moments = part is not StatePart.MOMENTS, part is not StatePart.WEIGHTS
    return LayerState(
        layer=state.layer,
        name=state.name,
        weights=state.weights if weights else {},
        buffers=state.buffers if weights else {},
        slots=state.slots if moments else {},
        updates=state.updates if moments else {},
        freezing=state.freezing if moments else {},
        shard=state.shard,
        elsewhere=state.elsewhere,
        fixed_names=state.fixed_names if weights else frozenset(),
        fixed_file=state.fixed_file,
        stored=state.stored if moments else None,
    )


def file_of_fixed(state: LayerState) -> bytes:
    """The safetensors file of the fixed parameters of `state`, none of which is left out.

    Raises:
        KeyError, SafetensorError: safetensors has no such dtype.
    """
    return save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.fixed.items()}, FIXED_METADATA
    )


def record_of_fixed(state: LayerState) -> FixedFile:
    """Size and sha256 of `file_of_fixed`, taken once; of a state that has fixed parameters."""
    record = state.fixed_file
    if not record.sha256:
        data = file_of_fixed(state)
        record.bytes, record.sha256 = len(data), hashlib.sha256(data).hexdigest()
    return record


def without_fixed(state: LayerState) -> LayerState:
    """`state` without its fixed parameters: whoever builds its layer has them, and compares by `record_of_fixed`."""
    if not state.fixed:
        return state
    record_of_fixed(state)
    moving = {name: weight for name, weight in state.weights.items() if name not in state.fixed_names}
    return replace(state, weights=moving)


def with_fixed_of(state: LayerState, built: LayerState) -> LayerState:
    """`state` with the fixed parameters that it leaves out, from another state of its layer.

    Raises:
        FixedDiffers: they are others.
    """
    if not state.leaves_out:
        return state
    _check_fixed(state, built)
    return replace(state, weights={**state.weights, **built.fixed})


class FixedDiffers(JobError):
    """A layer's fixed parameters are not those that a state of it was of."""


def _check_fixed(source: LayerState, built: LayerState) -> None:
    mine, theirs = record_of_fixed(built), source.fixed_file
    if source.fixed_names != built.fixed_names or not mine.same(theirs):
        raise FixedDiffers(
            f"layer {built.layer} ({built.name}): its fixed parameters are {mine} here but {theirs} where its state"
            " comes from: did a file of the model's weights change while the job ran? Put it back"
        )


def united(weights: LayerState, moments: LayerState) -> LayerState:
    """A layer with the weights and buffers of `weights` and the rest of `moments`."""
    return replace(
        weights,
        slots=moments.slots,
        updates=moments.updates,
        freezing=moments.freezing,
        flats=(),
        stored=moments.stored,
    )


def in_host_memory(state: LayerState) -> bool:
    """Whether none of its weights is on a GPU."""
    return not any(weight.is_cuda for weight in state.weights.values())


def bytes_of(state: LayerState) -> int:
    """The size of all tensors of `state`."""
    slots = (slot for of_one in state.slots.values() for slot in of_one.values())
    tensors = (*state.weights.values(), *state.buffers.values(), *slots, *state.freezing.values())
    return sum(tensor.nbytes for tensor in tensors)


def moving_bytes_of(state: LayerState) -> int:
    """The size of all tensors of `state` but the fixed parameters, which do not travel."""
    return bytes_of(state) - sum(tensor.nbytes for tensor in state.fixed.values())


def fresh(tensor: Tensor) -> Tensor:
    """The values of `tensor` in a new contiguous CPU allocation, with the allocator's own alignment."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not tensor.is_cuda:
        return copy.copy_(tensor.detach())
    raw, begin = copy.reshape(-1).view(torch.uint8), 0
    for part in parts_on_host(tensor):
        raw[begin : begin + len(part)] = part
        begin += len(part)
    return copy


def load_(state: LayerState, source: LayerState) -> None:
    """Copy the values of `source` into the tensors of `state`, in place; change nothing if they do not fit.

    A shard takes its parameters from a whole layer, or from any shard that has them. Freezing statistics that only one
    side has become zero, as before any check. Fixed parameters that `source` leaves out must be in `state`. Moments
    that lie in a file stay there, but for a shard.

    Raises:
        JobError: a layer name, tensor name, shape or dtype differs.
        MomentsLost: a shard's moments lie in a file that cannot be read.
        FixedDiffers: fixed parameters that `source` leaves out are others in `state`.
    """
    where = f"layer {state.layer} ({state.name})"
    remedy = "use the job.precision, [model] and [optimizer] settings that the state was saved with"
    if state.name != source.name:
        raise JobError(f"{where} cannot take the state of layer {source.layer} ({source.name}): {remedy}")
    left_out = state.fixed_names if source.leaves_out else frozenset[str]()
    if left_out:
        _check_fixed(source, state)
    if state.shard != WHOLE:
        source = with_moments(source)
    taker = state
    if source.stored is not None:
        taker = replace(state, slots={})
    elif state.stored is not None:
        taker = _with_zeros(state, {slot for of_one in source.slots.values() for slot in of_one})
    here, there = dict(_tensors(taker, left_out)), dict(_tensors(source, state.elsewhere))
    for key in {**here, **there}:
        if key not in there:
            raise JobError(f"{where}: {key} is missing in the state to load: {remedy}")
        if key not in here:
            raise JobError(f"{where}: the state to load has {key}, which the layer has not: {remedy}")
        mine, saved = _signature(here[key]), _signature(there[key])
        if mine != saved:
            raise JobError(f"{where}: {key} is {mine} here but {saved} in the state to load: {remedy}")
    statistics = chosen(source.freezing, _scalars(source), lambda name: name not in state.elsewhere)
    shared = state.freezing.keys() & statistics.keys()
    for key in sorted(shared):
        mine, saved = _signature(state.freezing[key]), _signature(statistics[key])
        if mine != saved:
            raise JobError(
                f"{where}: freezing statistic {key} is {mine} here but {saved} in the state to load: {remedy}"
            )
    counted = source.updates.keys() - state.elsewhere
    if state.updates.keys() != counted:
        odd = sorted(state.updates.keys() ^ counted)
        raise JobError(f"{where}: only one side counts the updates of {', '.join(odd)}: {remedy}")
    with torch.no_grad():
        for key, tensor in here.items():
            tensor.copy_(there[key])
        for key, tensor in state.freezing.items():
            if key in shared:
                tensor.copy_(statistics[key])
            else:
                tensor.zero_()
    if source.stored is not None:
        leave_moments(state, source.stored)
    elif state.stored is not None:
        _take_moments(state, taker)
    state.updates.update({name: source.updates[name] for name in state.updates})
    if state.fixed_names and not left_out:  # copies of `state` keep the record of what they are copies of
        state.fixed_file = FixedFile(source.fixed_file.bytes, source.fixed_file.sha256)
    state.recast()


def digest(state: LayerState) -> str:
    """sha256 (hex) over the weights, then the buffers, in name order: name, dtype, shape, bytes in C order.

    Optimizer state is left out: the digest tells whether two models are the same, bit for bit.
    """
    return digest_of(state.weights, state.buffers)


def digest_of(*groups: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over groups of tensors, each in name order, as `digest` has them."""
    sha256 = hashlib.sha256()
    for group in groups:
        for name in sorted(group):
            tensor = group[name]
            sha256.update(json.dumps([name, _dtype(tensor), list(tensor.shape)]).encode())
            for part in parts_on_host(tensor):
                sha256.update(part.numpy().data)
    return sha256.hexdigest()


def _tensors(state: LayerState, without: frozenset[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `state`, but those of the parameters `without`, keyed by a description in words."""
    for name, tensor in state.weights.items():
        if name not in without:
            yield f"weight {name}", tensor
    for name, tensor in state.buffers.items():
        yield f"buffer {name}", tensor
    for name, slots in state.slots.items():
        if name not in without:
            for slot, tensor in slots.items():
                yield f"optimizer state {slot} of {name}", tensor


def _scalars(state: LayerState) -> dict[str, int]:
    """Trained parameter of the state -> number of its scalars."""
    return {name: state.weights[name].numel() for name in state.updates}


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _signature(tensor: Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}"
