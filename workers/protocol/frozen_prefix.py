"""The frozen prefix: how many layers, from the input up, the next step leaves out of its backward pass.

The same on every rank, because it follows from the commits: see `workers/freezing/prefix/` for the rules. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FrozenPrefix:
    """The prefix of the next step, and what its rule remembers."""

    layers: int = 0
    """Layers of the model, from the first on, that the next step freezes; 0: none."""
    bound: float = 0.0
    """The rule's own count of frozen layers, as a real number: that between the first and the last."""
    sums: tuple[float, ...] = ()
    """Per layer, the sum of its gradient's norms since the last check, for a rule that compares those."""
    sums_before: tuple[float, ...] = ()
    """The same between the two checks before; empty before the first check."""
    since: int = 0
    """The first step that froze any layer, where that is to thaw; 0: none has."""
    thawed: bool = False
    """Whether the prefix was given up for good."""

    def to_json(self) -> dict[str, object]:
        return {
            "layers": self.layers,
            "bound": self.bound,
            "sums": list(self.sums),
            "sums_before": list(self.sums_before),
            "since": self.since,
            "thawed": self.thawed,
        }

    @staticmethod
    def from_json(value: object) -> FrozenPrefix:
        """The prefix that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        match value:
            case {
                "layers": int(layers),
                "bound": float(bound),
                "sums": list(sums),
                "sums_before": list(before),
                "since": int(since),
                "thawed": bool(thawed),
                **rest,
            } if min(layers, bound, since) >= 0 and not rest and all(map(_is_sum, (*sums, *before))):
                return FrozenPrefix(
                    layers=layers,
                    bound=bound,
                    sums=tuple(sums),
                    sums_before=tuple(before),
                    since=since,
                    thawed=thawed,
                )
            case _:
                raise ValueError(f"has a wrong prefix: {str(value)[:80]}")


def _is_sum(value: object) -> bool:
    return isinstance(value, float) and value >= 0
