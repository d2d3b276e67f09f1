"""Freeze counts of each parameter over a whole run: the ranks' counts of every step, added up by layer.

It does not matter which rank held a layer when, or whether that rank failed. Reads event values only; part of a
`FreezeRecord`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.history.thinning import Grid, thin, up_to
from workers.protocol.reports import FreezeReport

KEPT_NUMBERS = 20_000
"""Most counts that are kept: the more parameters a model has, the sooner old steps are summed."""
FEWEST_STEPS = 16
MOST_STEPS = 100
"""Fewest and most of the newest steps that are counted singly; as many sums are kept of older steps."""


@dataclass(kw_only=True)
class LayerCounts:
    """Freeze counts of one layer's parameters."""

    rank: int
    """Place of the rank that held the layer last, in the first pipeline that reported it."""
    passes: int
    """Counted backward passes."""
    counts: list[int]
    """Per parameter, in name order: passes in which it was frozen."""


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Freeze counts of all parameters of a model."""

    layers: dict[int, LayerCounts]
    steps: int
    """Steps that the run committed."""
    whole: int
    """Committed steps that are counted for every layer. If a rank is killed before it reports a step, its counts of
    that step are lost."""


@dataclass(kw_only=True)
class StepCounts:
    """The counts of one step, or their sum over consecutive steps."""

    steps: int = 1
    ranks: list[int] = field(default_factory=list)
    """Ranks that have reported the step."""
    layers: dict[int, LayerCounts] = field(default_factory=dict)


@dataclass
class CountedSteps:
    """The ranks' counts of each step."""

    by_step: dict[int, StepCounts] = field(default_factory=dict)
    """A sum is at the last of its steps."""
    first: int | None = None
    """The first step that has counts."""
    summed: int = 0
    """Reports up to this step are ignored."""

    def fold(self, report: FreezeReport) -> bool:
        """Add `report`; False if it is known: a controller that takes over receives some reports again."""
        if report.step <= self.summed:
            return False
        of_step = self.by_step.setdefault(report.step, StepCounts())
        self.first = report.step if self.first is None else min(self.first, report.step)
        if report.rank in of_step.ranks:
            return False
        of_step.ranks.append(report.rank)
        for layer, frozen in report.counts:
            counts = LayerCounts(rank=report.rank, passes=report.passes, counts=[*frozen])
            known = of_step.layers.get(layer)
            rank = report.rank if known is None else min(known.rank, report.rank)
            of_step.layers[layer] = _sum(known, counts, rank)
        kept = self._kept(of_step)
        if len(self.by_step) > 3 * kept:
            self._sum_up(Grid.at(report.step, recent=kept, kept=2 * kept))
        return True

    def take_back(self, step: int) -> None:
        """Forget the steps after `step`."""
        self.by_step = up_to(self.by_step, step)
        self.summed = min(self.summed, step)
        self.first = self.first if self.by_step else None

    def add_up(self, steps: int, passes: Callable[[int], int]) -> ParameterCounts | None:
        """The counts of the run so far; None if no step has any.

        Args:
            steps: steps that the run committed.
            passes: returns the backward passes of a layer in the first steps, so many, over all replicas.
        """
        layers: dict[int, LayerCounts] = {}
        for _, of_step in sorted(self.by_step.items()):
            for layer, counts in of_step.layers.items():
                layers[layer] = _sum(layers.get(layer), counts, counts.rank)
        if not layers or self.first is None:
            return None
        # Ranks report every step from the first one on in which anything may be frozen.
        before = min(self.first - 1, steps)
        for known in layers.values():
            known.passes += passes(before)
        whole = 0
        for step, of_step in self.by_step.items():
            due = passes(step) - passes(step - of_step.steps)
            if step <= steps:
                fewest = min(
                    of_step.layers[layer].passes if layer in of_step.layers else 0 for layer in layers
                )
                whole += of_step.steps * fewest // due
        return ParameterCounts(layers=layers, steps=steps, whole=before + whole)

    @staticmethod
    def _kept(of_step: StepCounts) -> int:
        """Number of steps that are counted singly if each has as many counts as `of_step`."""
        numbers = sum(len(layer.counts) for layer in of_step.layers.values())
        return min(max(KEPT_NUMBERS // (2 * max(numbers, 1)), FEWEST_STEPS), MOST_STEPS)

    def _sum_up(self, grid: Grid) -> None:
        self.by_step = thin(self.by_step, grid, _sum_steps)
        self.summed = max(self.summed, grid.whole)


def _sum(known: LayerCounts | None, more: LayerCounts, rank: int) -> LayerCounts:
    if known is None:
        return LayerCounts(rank=rank, passes=more.passes, counts=[*more.counts])
    counts = [sum(pair) for pair in zip(known.counts, more.counts, strict=True)]
    return LayerCounts(rank=rank, passes=known.passes + more.passes, counts=counts)


def _sum_steps(earlier: StepCounts, later: StepCounts) -> StepCounts:
    layers = dict(earlier.layers)
    for layer, counts in later.layers.items():
        layers[layer] = _sum(layers.get(layer), counts, counts.rank)
    return StepCounts(steps=earlier.steps + later.steps, layers=layers)
