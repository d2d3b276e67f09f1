"""A device whose layers do a small real computation and then wait out the modelled time.

Ranks, transport, commits and faults are real; only the arithmetic is small. Figures from it say so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from planner.ir import Action, ActionKind
from workers.config import EmulatedConfig
from workers.devices.device import CpuDevice
from workers.protocol.errors import JobError

_PARTS = {
    ActionKind.FORWARD: ("forward_s",),
    ActionKind.RECOMPUTE: ("forward_s",),
    ActionKind.INPUT_GRAD: ("input_grad_s",),
    ActionKind.WEIGHT_GRAD: ("weight_grad_s",),
    ActionKind.BACKWARD: ("input_grad_s", "weight_grad_s"),
    ActionKind.UPDATE: (),
}


class EmulatedDevice(CpuDevice):
    """Times from `times`: per layer, seconds of each part of a microbatch's work."""

    def __init__(self, times: dict[str, tuple[float, ...]]) -> None:
        super().__init__()
        self._times = times
        self._overslept_s = 0.0

    def start_window(self) -> None:
        super().start_window()
        self._overslept_s = 0.0

    def end(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> None:
        # A sleep that lasts too long shortens the next one: else a busy host would slow down the modelled device.
        modelled_s = self.slowdown * self.modelled_s(action, layers, frozen)
        until_s = self._begun_s + modelled_s - self._overslept_s
        now_s = time.perf_counter()
        if now_s < until_s:
            time.sleep(until_s - now_s)
            self._overslept_s = time.perf_counter() - until_s
        else:
            self._overslept_s -= max(0.0, modelled_s - (now_s - self._begun_s))
        self._record(action)

    def forward_s(self, layers: Sequence[int], measured_s: float) -> float:
        """The modelled time."""
        return sum(self._times["forward_s"][layer] for layer in layers)

    def modelled_s(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> float:
        """Modelled duration of `action`, without each layer's `frozen` share of its weight-gradient time."""
        total_s = 0.0
        for part in _PARTS[action.kind]:
            shares = frozen if frozen and part == "weight_grad_s" else (0.0,) * len(layers)
            for layer, share in zip(layers, shares, strict=True):
                total_s += self._times[part][layer] * (1.0 - share)
        return total_s


def layer_times(config: EmulatedConfig, layers: int) -> dict[str, tuple[float, ...]]:
    """Per part (`forward_s`, `input_grad_s`, `weight_grad_s`), the seconds of each of `layers` layers.

    Raises:
        JobError: the profile cannot be read, or a list has another length, or a time is negative.
    """
    given: dict[str, object] = {
        "forward_s": config.forward_s,
        "input_grad_s": config.input_grad_s,
        "weight_grad_s": config.weight_grad_s,
    }
    source = "cluster.emulated"
    if config.profile is not None:
        source = config.profile
        try:
            profile = json.loads(Path(config.profile).read_text())
            given = {part: profile[part] for part in given}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobError(
                f"cannot read layer times from {config.profile}: {error};"
                f" it must be JSON with the lists {', '.join(given)}"
            ) from error
    times: dict[str, tuple[float, ...]] = {}
    for part, value in given.items():
        if isinstance(value, int | float):
            value = (value,) * layers
        if not isinstance(value, list | tuple) or len(value) != layers:
            held = len(value) if isinstance(value, list | tuple) else 0
            raise JobError(
                f"{source}: {part} has {held} times, but the model has {layers} layers; give one for each"
            )
        if any(not isinstance(t, int | float) or not 0 <= t < float("inf") for t in value):
            raise JobError(f"{source}: {part} must hold times of zero or more seconds, got {list(value)}")
        times[part] = tuple(float(t) for t in value)
    return times
