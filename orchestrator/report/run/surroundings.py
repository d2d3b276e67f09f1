"""Surroundings of the ranks while they trained, in `report.html` and on a job's page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from orchestrator.events.types import Sampled, Surroundings
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import significant
from planner.features import FEATURES


@dataclass(frozen=True)
class SurroundingsPart:
    """The section."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class _Shown:
    title: str
    feature: str
    worst: Callable[..., float] = max
    """Picks the worst of the ranks' values."""


SLOWDOWN, WAITED = "slowdown", "waited"
UNITS = {
    SLOWDOWN: "measured over expected time",
    WAITED: "s per step",
    **{feature.name: feature.unit for feature in FEATURES},
}
SHOWN = (
    _Shown("Measured slowdown", SLOWDOWN),
    _Shown("Waiting for other ranks' messages", WAITED),
    _Shown("Cores that other processes take", "cpu_others"),
    _Shown("Waiting for a core", "cpu_pressure"),
    _Shown("The rank's busiest thread waits for a core", "own_waiting"),
    _Shown("Waiting for the disk", "io_pressure"),
    _Shown("Free memory", "memory_free", min),
    _Shown("Device memory in use by others", "gpu_memory_others"),
    _Shown("SM clock", "gpu_sm_clock", min),
    _Shown("Device busy", "gpu_busy"),
)


def surroundings(run: JobView) -> SurroundingsPart | None:
    """The worst and the median rank's surroundings over the steps; None for a job that does not sample them."""
    samples = run.adapt.samples
    drawn = tuple(chart for shown in SHOWN if (chart := _chart(run, samples, shown)) is not None)
    return SurroundingsPart(drawn) if drawn else None


def _chart(run: JobView, samples: list[Sampled], shown: _Shown) -> Chart | None:
    found = {
        each.step: values
        for each in samples
        if (values := [value for rank in each.ranks if (value := _value(rank, shown.feature)) is not None])
    }
    if not found:
        return None
    return Chart(
        title=shown.title,
        unit=UNITS[shown.feature],
        series=(
            Series(
                name="worst rank", points=tuple((step, shown.worst(each)) for step, each in found.items())
            ),
            Series(name="median rank", points=tuple((step, median(each)) for step, each in found.items())),
        ),
        format=significant,
        from_zero=True,
        emulated=run.emulated and shown.feature in (SLOWDOWN, WAITED),
    )


def _value(rank: Surroundings, feature: str) -> float | None:
    return {SLOWDOWN: rank.slowdown, WAITED: rank.waited_s, **dict(rank.values)}.get(feature)
