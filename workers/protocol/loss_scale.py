"""The factor that keeps small gradients of `float16` from becoming 0 (Micikevicius et al. 2018, "Mixed precision
training", section 3.2): the same on every rank, because it follows from the commits.

A power of two, so that multiplying and dividing by it changes no bit of a gradient that stays in range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

INITIAL = 2.0**16
GROWS_AFTER = 2000
"""Steps in a row without overflow, after which it is doubled."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the next step."""

    value: float = field(default_factory=lambda: INITIAL)
    applied: int = 0
    """Steps in a row, since it last changed, whose gradients were finite."""

    def after(self, *, skipped: bool) -> LossScale:
        """The scale once a step is committed. A step whose gradients are not finite is skipped and halves it."""
        if skipped:
            return LossScale(value=self.value / 2)
        if self.applied + 1 == GROWS_AFTER:
            return LossScale(value=self.value * 2)
        return LossScale(value=self.value, applied=self.applied + 1)

    def to_json(self) -> list[float]:
        return [self.value, self.applied]

    @staticmethod
    def from_json(value: object) -> LossScale | None:
        """The scale that `to_json` wrote; None for null.

        Raises:
            ValueError: it is neither.
        """
        match value:
            case None:
                return None
            case [float(scale), int(applied)] if scale > 0 and applied >= 0:
                return LossScale(value=scale, applied=applied)
            case _:
                raise ValueError(f"has a wrong loss_scale: {str(value)[:80]}")
