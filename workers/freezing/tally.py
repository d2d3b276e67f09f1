"""Counts what was frozen: per stage and microbatch of a step, and per parameter, in the step and since the start."""

from __future__ import annotations

from collections.abc import Mapping

from workers.freezing.mask import LayerParameters, Mask
from workers.protocol.reports import FreezeReport, FrozenAction, FrozenCounts


class Tally:
    """The masks of one rank.

    Args:
        microbatches: of the replica.
        stages: the rank's stages -> their layers.
        parameters: of the rank's layers. Live: what they weigh changes with the freeze plan.
        passes: microbatches that the rank's pipeline executes in a step.
    """

    def __init__(
        self,
        rank: int,
        microbatches: int,
        stages: Mapping[int, tuple[int, ...]],
        parameters: Mapping[int, LayerParameters],
        *,
        passes: int,
    ) -> None:
        self._passes_per_step = passes
        self._rank = rank
        self._microbatches = microbatches
        self._stages = stages
        self._parameters = parameters
        self._counts = {layer: [0] * len(held.names) for layer, held in parameters.items()}
        self._passes = 0
        self._masks: dict[tuple[int, int], Mask] = {}

    def note(self, layer: int, microbatch: int, mask: Mask) -> None:
        """The step's mask of `layer` in (global) `microbatch`."""
        self._masks[layer, microbatch] = mask

    def commit(self, step: int) -> FreezeReport:
        """Count the masks of `step`; returns what they left out."""
        masks, self._masks = self._masks, {}
        passes = self._passes_per_step
        self._passes += passes
        frozen = {layer: [0] * len(counts) for layer, counts in self._counts.items()}
        for (layer, _), mask in masks.items():
            if mask.frozen:
                for number, name in enumerate(self._parameters[layer].names):
                    frozen[layer][number] += name in mask.frozen
        for layer, counts in self._counts.items():
            self._counts[layer] = [sum(pair) for pair in zip(counts, frozen[layer], strict=True)]
        microbatches = sorted({microbatch for _, microbatch in masks})
        actions = tuple(
            self._action(stage, microbatch, {layer: masks[layer, microbatch] for layer in layers})
            for stage, layers in sorted(self._stages.items())
            for microbatch in microbatches
        )
        counted = tuple((layer, tuple(counts)) for layer, counts in sorted(frozen.items()))
        return FreezeReport(step=step, rank=self._rank, actions=actions, passes=passes, counts=counted)

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
        """Passes in which each parameter was frozen, over the steps committed, the last of them `step`."""
        return FrozenCounts(
            step=step,
            rank=self._rank,
            passes=self._passes,
            counts=tuple(
                (layer, name, count)
                for layer, counts in sorted(self._counts.items())
                for name, count in zip(self._parameters[layer].names, counts, strict=True)
            ),
        )
