"""Slowdowns of candidates by the interference model: what a rank measured, carried over to other layers. Pure.

The forest predicts a stage's slowdown from the state of the device and the stage (DynPipe, section V-A and Algorithm
2, line 13). What a rank measured of the layers that it holds is exact; the forest says how much more, or less, other
layers would be slowed down there, of which half is believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.features import row
from planner.interference.predictor import Predictor
from planner.profile import ModelProfile
from planner.repartition.slowdowns import PlaceLoad

MOST = 2.0
"""Largest factor, either way, by which the forest may say that other layers change a slowdown."""
BELIEVED = 0.5
"""Share of that factor's logarithm that counts: the forest errs on a change by about as much as there is to it, and its
choices are worse with the whole of it (`benchmarks/forest_choices.py`)."""

Layers = tuple[tuple[int, int], ...]
"""[first, stop) of each stage of a rank."""


class ForestSlowdowns:
    """Slowdowns of what places may hold.

    Args:
        measured: by place, of what it holds.
        held: by place, what it holds.
        sampled: by place, the features of its device and host; empty: nothing is known of them, and the measured
            slowdown stands for all layers.
    """

    def __init__(
        self,
        predictor: Predictor,
        model: ModelProfile,
        measured: Sequence[float],
        held: Sequence[Layers],
        sampled: Sequence[Mapping[str, float]],
    ) -> None:
        self._predictor = predictor
        self._model = model
        self._measured = measured
        self._sampled = sampled
        self._held = self._predicted(list(enumerate(held)))

    def __call__(self, loads: Sequence[PlaceLoad], /) -> list[float]:
        predicted = self._predicted([(load.place, load.layers) for load in loads])
        return [
            carried_over(self._measured[load.place], factor, self._held[load.place])
            for load, factor in zip(loads, predicted, strict=True)
        ]

    def _predicted(self, loads: Sequence[tuple[int, Layers]]) -> list[float]:
        """The forest's slowdown of each (place, layers); 1 where it has nothing to go by."""
        known = [number for number, (place, _) in enumerate(loads) if self._sampled[place]]
        found = [1.0] * len(loads)
        if known:
            rows = np.array(
                [
                    row(
                        {
                            **self._sampled[place],
                            "measured_ratio": self._measured[place],
                            **stage_features(self._model, [range(*span) for span in layers]),
                        }
                    )
                    for place, layers in (loads[number] for number in known)
                ]
            )
            for number, factor in zip(known, self._predictor.predict(rows).tolist(), strict=True):
                found[number] = factor
        return found


def carried_over(measured: float, predicted: float, predicted_held: float) -> float:
    """The slowdown of other layers, where `measured` is that of the layers held.

    Args:
        predicted: by the forest, of the other layers.
        predicted_held: of those held.
    """
    return measured * min(MOST, max(1 / MOST, predicted / predicted_held)) ** BELIEVED


def stage_features(model: ModelProfile, stages: Sequence[Sequence[int]]) -> dict[str, float]:
    """Features of `planner.features.STAGE` that follow from profile and plan.

    Args:
        stages: the layers of each stage of the rank, ascending; none is empty.
    """
    layers = [model.layers[number] for stage in stages for number in stage]
    forward_s = sum(layer.forward_s for layer in layers)
    work_s = forward_s + sum(layer.backward_s for layer in layers)
    found = {
        "layers": float(len(layers)),
        "work": work_s,
        "parameters": float(sum(layer.parameters for layer in layers)),
        "messages": float(sum(_sent_bytes(model, stage) for stage in stages)),
    }
    return found | ({"forward_share": forward_s / work_s} if work_s else {})


def _sent_bytes(model: ModelProfile, stage: Sequence[int]) -> int:
    """Bytes that a stage sends per microbatch: its outputs on, and the gradient of its inputs back."""
    onward = model.layers[stage[-1]].boundary_bytes if stage[-1] + 1 < len(model.layers) else 0
    return onward + (model.layers[stage[0] - 1].boundary_grad_bytes if stage[0] else 0)
