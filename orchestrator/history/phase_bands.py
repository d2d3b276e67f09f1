"""A job's freezing phases as runs of steps with names for people, from its resolved `[freeze]` sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.freezing import Phase, Phases, has_program

_NAMES = {
    Phase.WARM_UP: "warm-up",
    Phase.UPPER: "monitoring, nothing frozen",
    Phase.LOWER: "monitoring, all frozen",
    Phase.RAMP: "ramp",
    Phase.STABLE: "stable",
}


@dataclass(frozen=True, kw_only=True)
class Band:
    """A run of steps, tinted behind the curves."""

    name: str
    first: int
    last: int

    @property
    def steps(self) -> str:
        """`21–30`."""
        return f"{self.first:,}–{self.last:,}"


def phases_of(freeze: Mapping[str, Any]) -> Phases | None:
    """TimelyFreeze's phases; None if the method has none or the section is not resolved."""
    values = {name: freeze.get(name) for name in ("warm_up", "monitoring", "ramp")}
    if not has_program(str(freeze.get("method", ""))) or None in values.values():
        return None
    return Phases(**values)  # pyright: ignore[reportArgumentType]


def phase_bands(sections: Sequence[tuple[int, Mapping[str, Any]]], steps: int) -> tuple[Band, ...]:
    """The phases that a job of `steps` steps goes through, in order; empty if nothing is ever frozen.

    Args:
        sections: (first step, section from there on), oldest first.
    """
    lasts = [*(first - 1 for first, _ in sections[1:]), steps]
    bands: list[Band] = []
    for (first, section), last in zip(sections, lasts, strict=True):
        for band in _bands(section, last):
            if band.last >= first:
                bands.append(Band(name=band.name, first=max(band.first, first), last=band.last))
    return tuple(bands)


def _bands(freeze: Mapping[str, Any], steps: int) -> tuple[Band, ...]:
    """The phases of the steps up to `steps` if all followed `freeze`."""
    if freeze.get("method", "none") == "none":
        return ()
    phases = phases_of(freeze)
    if phases is None:
        warm_up = freeze.get("warm_up") or 0
        ends = [("warm-up", warm_up), ("freezing", steps)]
    else:
        lasts = (phases.warm_up, phases.middle, phases.monitoring, phases.ramp, steps)
        ends = list(zip(_NAMES.values(), lasts, strict=True))
    bands, first = [], 1
    for name, last in ends:
        last = min(last, steps)
        if last >= first:
            bands.append(Band(name=name, first=first, last=last))
        first = last + 1
    return tuple(bands)


def phase_at(bands: tuple[Band, ...], step: int) -> str | None:
    """The name of the band that `step` lies in."""
    return next((band.name for band in bands if band.first <= step <= band.last), None)
