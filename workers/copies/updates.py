"""The commits of a layer applied to a copy of it as its owner applies them: the same operations in the same order, so
the same bits. Knows not when a copy is brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from planner.host_copies import PART
from workers.copies.redundancy import Packing
from workers.freezing.checks import Checks
from workers.freezing.freezer import begin_statistics
from workers.freezing.mask import LayerParameters
from workers.freezing.plans import FreezeSettings
from workers.freezing.stability import make_metric
from workers.process.pinned_memory import parts_on_host, to_device
from workers.state.flat import FlatGradients
from workers.state.layer_state import LayerState, apart_on
from workers.state.optim import Optimizer


class UpdateDecision(Protocol):
    """Part of a commit's decision that an update needs: see `workers.commit.commit.CommitDecision`."""

    @property
    def skipped(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def lr(self) -> float: ...

    @property
    def scores(self) -> Mapping[int, float]: ...


@dataclass(frozen=True)
class Update:
    """One commit of a layer."""

    step: int
    parcel: Tensor
    """See `Packing`."""
    decision: UpdateDecision


class Updates:
    """Brings one copy from commit to commit.

    Args:
        state: the copy, with the buffers that updates change, on the device that its owner computes on.
        freeze: the settings that the owner follows.
        step: the last step committed in `state`.
    """

    def __init__(self, state: LayerState, freeze: FreezeSettings, optimizer: Optimizer, step: int) -> None:
        self.step = step
        """The newest one applied."""
        self._state = state
        self._freeze = freeze
        self._optimizer = optimizer
        self._packing = Packing(state)
        self._follow(step + 1)

    def _follow(self, step: int) -> None:
        """Follow the freeze settings of `step`, the next one."""
        state = self._state
        self._settings = self._freeze.at(step)
        self._checks = Checks(self._settings, {state.layer: state}, {state.layer: LayerParameters.of(state)})

    def apply(self, update: Update) -> None:
        """Do what the owner does at the commit of `update`, which is the next one."""
        state, decision = self._state, update.decision
        self._checks.look(update.step)
        if not decision.skipped:
            parcel = self._packing.unpack(update.parcel)
            for name, value in parcel.buffers.items():
                state.buffers[name].copy_(value)
            self._optimizer.update_(state, parcel.gradients, decision.scale, decision.lr)
            if "energy" in state.freezing:
                state.freezing["energy"].copy_(parcel.energies)
        self._checks.accept(decision.scores)
        before, following = self._settings, self._freeze.at(update.step + 1)
        if following != before:
            if following.method != before.method:
                begin_statistics(following, state)
            self._follow(update.step + 1)
        self.step = update.step


def looks_at_whole_layers(freeze: FreezeSettings, first: int, last: int) -> bool:
    """Whether the commits of these steps need more of a layer than each element by itself: for its stability, or
    because other statistics begin."""
    settings = freeze.at(first)
    return make_metric(settings) is not None or any(
        freeze.at(step) != settings for step in range(first + 1, last + 2)
    )


def updated_in_parts(
    base: LayerState,
    log: Sequence[Update],
    optimizer: Optimizer,
    device: torch.device,
    stopped: Callable[[], bool],
) -> LayerState | None:
    """A new state in host memory: `base`, which is in host memory too, after the commits of `log`.

    They are applied on `device` to one part after the other, which takes little memory there: updates are element by
    element. Not for steps in which something `looks_at_whole_layers`.

    Returns:
        None: `stopped` said so.
    """
    new, packing = apart_on(base, torch.device("cpu")), Packing(base)
    applied = [each for each in log if not each.decision.skipped]
    parcels = [packing.unpack(each.parcel) for each in applied]
    for number, elements in _parts(base):
        here = _part(new, number, elements, base.updates)
        there = here if device.type == "cpu" else apart_on(here, device)
        for update, parcel in zip(applied, parcels, strict=True):
            if stopped():
                return None
            (flat,), summed = there.flats, parcel.gradients
            if not summed.buffers:
                continue
            values = to_device(summed.buffers[number][elements], device, ours=True)
            present = {place.name for place in flat.layout.places} & summed.keys()
            gradients = FlatGradients.of([flat.layout], [values], present)
            optimizer.update_(there, gradients, update.decision.scale, update.decision.lr)
        new.updates.update(there.updates)
        if there is not here:
            _copy_back(here, there)
    for parcel in parcels[-1:]:
        for name, value in parcel.buffers.items():
            new.buffers[name].copy_(value)
        if "energy" in new.freezing:
            new.freezing["energy"].copy_(parcel.energies)
    return None if stopped() else new


def _parts(state: LayerState) -> Iterator[tuple[int, slice]]:
    """(flat buffer, elements of it)."""
    for number, flat in enumerate(state.flats):
        for begin in range(0, flat.layout.size, PART):
            yield number, slice(begin, min(begin + PART, flat.layout.size))


def _part(state: LayerState, number: int, elements: slice, updates: Mapping[str, int]) -> LayerState:
    """State of `elements` of one flat buffer of `state`, in the same memory, after so many updates."""
    flat = state.flats[number]
    layout = flat.layout.part(elements)
    weights, slots = flat.weights[elements], {slot: each[elements] for slot, each in flat.slots.items()}
    names = [place.name for place in layout.places]
    return replace(
        state,
        weights=layout.views(weights),
        buffers={},
        slots={},
        updates={name: updates[name] for name in names},
        freezing={},
        flats=(replace(flat, layout=layout, weights=weights, slots=slots),),
    )


def _copy_back(here: LayerState, there: LayerState) -> None:
    (mine,), (theirs,) = here.flats, there.flats
    for slot, values in {"": theirs.weights, **theirs.slots}.items():
        raw, begin = (mine.slots[slot] if slot else mine.weights).view(torch.uint8), 0
        for part in parts_on_host(values):
            raw[begin : begin + len(part)] = part
            begin += len(part)
