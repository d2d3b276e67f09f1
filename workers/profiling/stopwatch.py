"""Times the actions of single layers with the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from planner.ir import Action
from workers.devices.device import Device
from workers.devices.emulated import EmulatedDevice


class Stopwatch:
    """The action of one layer after another, each from `begin` to `end`; an action may have several parts."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun_s = 0.0
        self._emulated: list[tuple[Action, float]] = []

    @property
    def tells_parts_apart(self) -> bool:
        """Whether a part of an action has a time of its own: an emulated device knows whole layers only."""
        return not isinstance(self._device, EmulatedDevice)

    def start(self) -> None:
        """Begin a new round."""
        self._emulated.clear()
        self._device.start_window()

    def begin(self) -> None:
        self._device.begin()
        self._begun_s = time.perf_counter()

    def end(self, action: Action) -> None:
        """The action of layer `action.stage`, or a part of it, is over."""
        layers = [action.stage]
        if isinstance(self._device, EmulatedDevice):
            # Sleeping too long delays the action as a whole, not each of its layers.
            modelled_s = self._device.modelled_s(action, layers)
            self._emulated.append((action, max(modelled_s, time.perf_counter() - self._begun_s)))
        self._device.end(action, layers)

    def seconds(self) -> Iterator[tuple[Action, float]]:
        """Each action of this round with its time, in order; an emulated device's modelled time, or the real one where
        that is longer."""
        if isinstance(self._device, EmulatedDevice):
            yield from self._emulated
            return
        for span in self._device.spans():
            yield Action.parse(span.action), span.end_s - span.start_s
