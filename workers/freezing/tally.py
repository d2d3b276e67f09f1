"""What was frozen: per stage and microbatch of a step, and per parameter over all steps. It only counts."""

from __future__ import annotations

from collections.abc import Mapping

from workers.freezing.mask import NOTHING, LayerParameters, Mask
from workers.protocol import FreezeReport, FrozenAction, FrozenCounts


class Tally:
    """The masks of one rank.

    Args:
        microbatches: of the replica.
        stages: the rank's stages that have a backward pass -> their layers.
        windows: replicas that the rank's pipeline executes.
    """

    def __init__(
        self,
        rank: int,
        microbatches: int,
        stages: Mapping[int, tuple[int, ...]],
        parameters: Mapping[int, LayerParameters],
        *,
        windows: int = 1,
    ) -> None:
        self._windows = windows
        self._rank = rank
        self._microbatches = microbatches
        self._stages = stages
        self._parameters = parameters
        self._counts = {(layer, name): 0 for layer, held in parameters.items() for name in held.names}
        self._passes = 0
        self._masks: dict[tuple[int, int], Mask] = {}

    def note(self, layer: int, microbatch: int, mask: Mask) -> None:
        """The step's mask of `layer` in (global) `microbatch`."""
        self._masks[layer, microbatch] = mask

    def commit(self, step: int) -> FreezeReport | None:
        """Count the masks of `step`; what they left out, unless nothing could have been."""
        masks, self._masks = self._masks, {}
        self._passes += self._microbatches * self._windows
        for (layer, _), mask in masks.items():
            for name in mask.frozen:
                self._counts[layer, name] += 1
        if all(mask is NOTHING for mask in masks.values()):
            return None
        microbatches = sorted({microbatch for _, microbatch in masks})
        actions = tuple(
            self._action(stage, microbatch, {layer: masks[layer, microbatch] for layer in layers})
            for stage, layers in sorted(self._stages.items())
            for microbatch in microbatches
        )
        return FreezeReport(step=step, rank=self._rank, actions=actions)

    def _action(self, stage: int, microbatch: int, masks: Mapping[int, Mask]) -> FrozenAction:
        planned = actual = 0.0
        weight = scalars = frozen = 0
        for layer, mask in masks.items():
            held = self._parameters[layer]
            own = sum(held.weights)
            weight, scalars, frozen = weight + own, scalars + sum(held.scalars), frozen + mask.parameters
            planned, actual = planned + own * mask.planned, actual + own * mask.actual
        return FrozenAction(
            stage=stage,
            microbatch=microbatch % self._microbatches,
            planned=planned / weight if weight else 0.0,
            actual=actual / weight if weight else 0.0,
            parameters=frozen / scalars if scalars else 0.0,
        )

    def counts(self, step: int) -> FrozenCounts:
        """How often each parameter was frozen in the steps committed, the last of them `step`."""
        return FrozenCounts(
            step=step,
            rank=self._rank,
            passes=self._passes,
            counts=tuple((layer, name, count) for (layer, name), count in sorted(self._counts.items())),
        )
