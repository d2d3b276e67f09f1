"""The commits of a layer applied to a copy of it as its owner applies them: the same operations in the same order, so
the same bits. Knows neither where a copy is kept nor when it is brought up to date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.elastic.redundancy import Packing
from workers.freezing.checks import Checks
from workers.freezing.freezer import begin_statistics
from workers.freezing.mask import LayerParameters
from workers.freezing.plans import Settings
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer


class Decided(Protocol):
    """What an update needs of a commit's decision: see `workers.commit.Decision`."""

    @property
    def skipped(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def scores(self) -> Mapping[int, float]: ...


@dataclass(frozen=True)
class Update:
    """One commit of a layer."""

    step: int
    parcel: Tensor
    """See `Packing`."""
    decision: Decided


class Updates:
    """Brings one copy from commit to commit.

    Args:
        state: the copy, with the buffers that updates change, on the device that its owner computes on.
        freeze: the settings that the owner follows.
        step: the last step committed in `state`.
    """

    def __init__(self, state: LayerState, freeze: Settings, optimizer: Optimizer, step: int) -> None:
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
            self._optimizer.update_(state, parcel.gradients, decision.scale, update.step - 1)
            if "energy" in state.freezing:
                state.freezing["energy"].copy_(parcel.energies)
        self._checks.take(decision.scores)
        before, following = self._settings, self._freeze.at(update.step + 1)
        if following != before:
            if following.method != before.method:
                begin_statistics(following, state)
            self._follow(update.step + 1)
        self.step = update.step
