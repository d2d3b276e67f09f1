"""How often each parameter was frozen over a whole run: what its ranks told of every step, added up by layer.

So it does not matter which rank held a layer when, nor what became of it. Reads event values only; part of a
`FreezeRecord`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from workers.protocol import FreezeReport

Counts = tuple[tuple[int, tuple[int, ...]], ...]
"""(layer, of each of its parameters in name order the passes in which it was frozen)."""


@dataclass(kw_only=True)
class LayerCounts:
    """How often the parameters of one layer were frozen."""

    rank: int
    """Place of the rank that held it last, in the first pipeline that told of it."""
    passes: int
    """Backward passes that are counted."""
    counts: list[int]
    """Of each parameter, in name order: those in which it was frozen."""


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """How often all parameters of a model were frozen."""

    layers: dict[int, LayerCounts]
    steps: int
    """That the run committed."""
    whole: int
    """Of these, the steps that are counted for every layer. What a rank froze in the steps that it had not told of when
    it was killed, nobody else knows."""


@dataclass
class CountedSteps:
    """What ranks told of each step."""

    _told: dict[int, dict[int, tuple[int, Counts]]] = field(default_factory=lambda: defaultdict(dict))
    """Step -> place -> its passes, and how often each parameter was frozen."""

    def take(self, report: FreezeReport) -> bool:
        """Add `report`; False if it is known: a controller that takes over is told some things again."""
        of_step = self._told[report.step]
        if report.rank in of_step:
            return False
        of_step[report.rank] = report.passes, report.counts
        return True

    def void_after(self, step: int) -> None:
        """Forget what came after `step`: it is run again."""
        for later in [number for number in self._told if number > step]:
            del self._told[later]

    def add_up(self, steps: Collection[int], passes: int) -> ParameterCounts | None:
        """The counts of the run so far; None if no step told of any, as in older logs.

        Args:
            steps: that the run committed.
            passes: backward passes of a layer in one step, over all replicas.
        """
        layers: dict[int, LayerCounts] = {}
        covered: dict[int, dict[int, int]] = {}
        for step, of_step in sorted(self._told.items()):
            covered[step] = defaultdict(int)
            for rank, (count, of_layers) in sorted(of_step.items(), reverse=True):
                for layer, frozen in of_layers:
                    known = layers.setdefault(
                        layer, LayerCounts(rank=rank, passes=0, counts=[0] * len(frozen))
                    )
                    known.rank = rank
                    known.passes += count
                    known.counts = [sum(pair) for pair in zip(known.counts, frozen, strict=True)]
                    covered[step][layer] += count
        if not layers:
            return None
        # Ranks tell of every step from the first one on in which anything may be frozen.
        before = [step for step in steps if step < min(covered)]
        for known in layers.values():
            known.passes += passes * len(before)
        whole = [
            step for step in steps if all(covered.get(step, {}).get(layer) == passes for layer in layers)
        ]
        return ParameterCounts(layers=layers, steps=len(steps), whole=len(before) + len(whole))
