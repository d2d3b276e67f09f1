"""The layers' times as steps measure them: a profile that follows the job.

A stage's measured time tells a slow device and a heavier layer not apart, so that the whole stays the rank's slowdown
(`planner/adapt/speeds.py`). How it is divided among forward, input gradient and weight gradient is the layers' own,
whatever the device: that division is corrected here. Holds state but no clock.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from planner.ir import ActionKind
from planner.observed import StepTimes
from planner.plan import Plan
from planner.profile import Profile

SMOOTHING = 0.1
"""Weight of one step."""
MATERIAL = 1.1
"""Factor by which a time must have changed since the last correction that was given out."""
MOST = 4.0
"""Largest correction that is believed, either way."""

Time = Literal["forward_s", "input_grad_s", "weight_grad_s"]
TIMES: tuple[Time, ...] = ("forward_s", "input_grad_s", "weight_grad_s")
_OF_KIND: dict[ActionKind, tuple[Time, ...]] = {
    ActionKind.FORWARD: ("forward_s",),
    ActionKind.BACKWARD: ("input_grad_s", "weight_grad_s"),
    ActionKind.INPUT_GRAD: ("input_grad_s",),
    ActionKind.WEIGHT_GRAD: ("weight_grad_s",),
}


Factors = tuple[tuple[float, float, float], ...]
"""Per layer, on the profile's forward, input gradient and weight gradient."""


def with_factors(profile: Profile, factors: Factors) -> Profile:
    """`profile` with its layers' times multiplied; as it is if there are no factors.

    Raises:
        ValueError: not three factors per layer.
    """
    if not factors:
        return profile
    layers = tuple(
        replace(
            layer,
            **{time: getattr(layer, time) * factor for time, factor in zip(TIMES, of_layer, strict=True)},
        )
        for layer, of_layer in zip(profile.model.layers, factors, strict=True)
    )
    return replace(profile, model=replace(profile.model, layers=layers))


class LayerTimeCorrections:
    """Corrections of one profile's layer times.

    Args:
        profile: as measured before the job.
        known: the factors that are known already.
    """

    def __init__(self, profile: Profile, known: Factors = ()) -> None:
        self._profile = profile
        self._logs = {
            (layer, time): math.log(factor)
            for layer, factors in enumerate(known)
            for time, factor in zip(TIMES, factors, strict=True)
        }
        self._given = dict(self._logs)

    @property
    def factors(self) -> Factors:
        """Current factors on the layers' times."""

        def of(layer: int, time: Time) -> float:
            return round(math.exp(self._logs.get((layer, time), 0.0)), 4)

        layers = range(len(self._profile.model.layers))
        return tuple(
            (of(layer, "forward_s"), of(layer, "input_grad_s"), of(layer, "weight_grad_s"))
            for layer in layers
        )

    def observe(self, observed: StepTimes, plan: Plan) -> bool:
        """Learn from one rank's step, which must make sense; return whether a time has become another since this was so
        last.

        Args:
            plan: that the step was trained with.
        """
        if observed.frozen:
            return False
        ratios: dict[tuple[int, ActionKind], float] = {}
        measured_s = expected_s = 0.0
        for time in observed.times:
            kind = ActionKind(time.kind)
            if kind not in _OF_KIND:
                continue
            layers = self._measured(plan, time.stage, kind, observed.prefix)
            once_s = self._expected_s(layers, _OF_KIND[kind])
            if once_s <= 0 or time.seconds <= 0:
                continue
            ratios[time.stage, kind] = time.seconds / (once_s * time.count)
            measured_s += time.seconds
            expected_s += once_s * time.count
        for (stage, kind), ratio in ratios.items():
            factor = ratio * expected_s / measured_s
            if 1 / MOST <= factor <= MOST:
                layers = self._measured(plan, stage, kind, observed.prefix)
                self._learn(layers, _OF_KIND[kind], math.log(factor))
        changed = any(
            abs(log - self._given.get(key, 0.0)) > math.log(MATERIAL) for key, log in self._logs.items()
        )
        if changed:
            self._given = dict(self._logs)
        return changed

    def _learn(self, layers: range, times: tuple[Time, ...], log: float) -> None:
        for layer in layers:
            for time in times:
                known = self._logs.get((layer, time), 0.0)
                self._logs[layer, time] = known + SMOOTHING * (log - known)

    def _measured(self, plan: Plan, stage: int, kind: ActionKind, prefix: int) -> range:
        """The layers that such an action of a stage works on, where `prefix` layers have no backward pass."""
        first, stop = plan.layers[stage]
        return range(first if kind is ActionKind.FORWARD else max(first, prefix), stop)

    def _expected_s(self, layers: range, times: tuple[Time, ...]) -> float:
        profiled = self._profile.model.layers
        return sum(getattr(profiled[layer], time) for layer in layers for time in times)
