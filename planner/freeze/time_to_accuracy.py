"""Whether freezing pays: shorter steps against more of them (TimelyFreeze section 3.4 and appendix D).

Knows times and shares of gradient energy, and not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-9
"""Shares that are as near as this, relatively, are alike: sums and quotients of floats leave them apart."""

_CONTROLS = {"apf": "freeze.apf_threshold", "autofreeze": "freeze.autofreeze_percentile"}
"""What to lower for less freezing. All other methods have budgets, which freeze.r_max bounds."""


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
        ValueError: not as many of one as of the other.
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
    """`average_effective_update` of the steps so far, taken in one by one; 1 before the first."""

    def __init__(self) -> None:
        self.share = 1.0
        self._energy = 0.0
        """Sum over the steps of `share`."""

    def add(self, effective_update: float, gradient_energy: float) -> None:
        # Of the steps so far only their average and its weight are needed.
        energies = [self._energy, gradient_energy]
        self.share = average_effective_update([self.share, effective_update], energies)
        self._energy = sum(energies)


def time_to_accuracy_ratio(kappa: float, p_eff: float) -> float:
    """Time to a given accuracy with freezing over that without (eq. 13); infinite if no update is left.

    Args:
        p_eff: the average of definition D.8.
    """
    return kappa / p_eff if p_eff > 0 else float("inf")


def anything_frozen(p_eff: float) -> bool:
    """Whether less than the whole gradient reaches the weights."""
    return _above(1.0, p_eff)


def warning(kappa: float, p_eff: float, method: str) -> str | None:
    """What to tell the user while freezing costs more than it brings: kappa above p_eff (eq. 55). None
    otherwise, also while both are alike, and where nothing is frozen: then steps take longer for other reasons.

    Args:
        method: `freeze.method`, whose own control the text names.
    """
    if not anything_frozen(p_eff) or not _above(kappa, p_eff):
        return None
    longer = (
        f"so the same loss is expected to take {time_to_accuracy_ratio(kappa, p_eff):.2f} times as long"
        if p_eff > 0
        else "so the loss is expected to stay where it is"
    )
    return (
        f"freezing costs more than it brings: a step takes {kappa:.2f} of its time (kappa), but {p_eff:.2f} of the"
        f" gradient's energy reaches the weights, {longer}. Lower {_CONTROLS.get(method, 'freeze.r_max')}, or set"
        " freeze.method to none"
    )


def _above(larger: float, smaller: float) -> bool:
    """Whether it is more than rounding that makes `larger` so."""
    return larger > smaller * (1 + ROUNDING)
