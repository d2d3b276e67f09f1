"""Whether freezing pays: shorter steps against more steps (TimelyFreeze section 3.4 and appendix D).

Knows times and shares of gradient energy, but not their source.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-9
"""Relative difference below which two shares count as equal: it covers the rounding of sums and quotients."""

_CONTROLS = {
    "apf": "freeze.apf_threshold",
    "autofreeze": "freeze.autofreeze_percentile",
    "pipetransformer": "freeze.alpha",
    "prefix": "the layers that freeze.prefix or freeze.schedule freezes",
}
"""The setting to lower for less freezing. All other methods have budgets, which freeze.r_max bounds."""


def kappa(frozen_s: float, unfrozen_s: float) -> float:
    """Step time with freezing over step time without (eq. 12).

    Raises:
        ValueError: `unfrozen_s` is not above zero.
    """
    if unfrozen_s <= 0:
        raise ValueError(f"a step without freezing takes {unfrozen_s} s; a time is above zero")
    return frozen_s / unfrozen_s


def approximate_step_s(r_max: float, unfrozen_s: float, all_frozen_s: float) -> float:
    """Step time at `r_max` if it fell evenly from nothing to everything frozen (eq. 48).

    Not a bound: freezing more than the mean where it counts gets below it, other stages' budgets keep above it.
    """
    return all_frozen_s + (1.0 - r_max) * (unfrozen_s - all_frozen_s)


def approximate_kappa(r_max: float, unfrozen_s: float, all_frozen_s: float) -> float:
    """`approximate_step_s` over the step time without freezing (eq. 49 and 50).

    Raises:
        ValueError: `unfrozen_s` is not above zero.
    """
    return kappa(approximate_step_s(r_max, unfrozen_s, all_frozen_s), unfrozen_s)


def average_effective_update(effective_updates: Sequence[float], gradient_energies: Sequence[float]) -> float:
    """The average over the horizon, which eq. 13 needs: steps weigh as their gradients do (definition D.8); 1 if there
    is no gradient.

    Args:
        effective_updates: per step, the share of its gradient's energy that reaches the weights (definition D.7).
        gradient_energies: per step, the squared norm of the gradient.

    Raises:
        ValueError: the lengths differ.
    """
    if len(effective_updates) != len(gradient_energies):
        raise ValueError(
            f"{len(effective_updates)} effective updates for the gradients of {len(gradient_energies)} steps; one each"
            " is needed"
        )
    total = sum(gradient_energies)
    if total <= 0:
        return 1.0
    return (
        sum(share * energy for share, energy in zip(effective_updates, gradient_energies, strict=True))
        / total
    )


class RunningUpdate:
    """`average_effective_update` of the steps so far, updated step by step; 1 before the first."""

    def __init__(self) -> None:
        self.share = 1.0
        self._energy = 0.0
        """Sum over the steps of `share`."""

    def add(self, effective_update: float, gradient_energy: float) -> None:
        # The average of the steps so far and its weight are enough.
        energies = [self._energy, gradient_energy]
        self.share = average_effective_update([self.share, effective_update], energies)
        self._energy = sum(energies)


def time_to_accuracy_ratio(kappa: float, p_eff: float) -> float:
    """Time to a given accuracy with freezing over that without (eq. 13); infinite if no update is left.

    Args:
        p_eff: the average of definition D.8.
    """
    return kappa / p_eff if p_eff > 0 else float("inf")


def pays(kappa: float, p_eff: float) -> bool:
    """Whether freezing gains more than it costs (eq. 55)."""
    return _above(p_eff, kappa)


def anything_frozen(p_eff: float) -> bool:
    """Whether less than the whole gradient reaches the weights."""
    return _above(1.0, p_eff)


def warning(kappa: float, p_eff: float, method: str) -> str | None:
    """The warning while freezing costs more than it gains: kappa above p_eff (eq. 55). None otherwise, also if both are
    equal up to rounding, and if nothing is frozen: then steps take longer for other reasons.

    Args:
        method: `freeze.method`, whose setting the text names.
    """
    if not costs(kappa, p_eff):
        return None
    longer = (
        f"so the same loss is expected to take {time_to_accuracy_ratio(kappa, p_eff):.2f} times as long"
        if p_eff > 0
        else "so the loss is expected to stay where it is"
    )
    return (
        f"{cost_text(kappa, p_eff)}, {longer}. Lower {_CONTROLS.get(method, 'freeze.r_max')}, or set"
        " freeze.method to none"
    )


def costs(kappa: float, p_eff: float) -> bool:
    """Whether freezing costs more than it gains, as for `warning`."""
    return anything_frozen(p_eff) and _above(kappa, p_eff)


def cost_text(kappa: float, share: float, left: str = "the gradient's energy reaches the weights") -> str:
    """Cost and gain of freezing, in words.

    Args:
        share: of what is `left`.
    """
    cost = f"a step takes {kappa:.2f} of its time (kappa), but {share:.2f} of {left}"
    return f"freezing costs more than it brings: {cost}"


def _above(larger: float, smaller: float) -> bool:
    """Whether `larger` exceeds `smaller` by more than rounding."""
    return larger > smaller * (1 + ROUNDING)
