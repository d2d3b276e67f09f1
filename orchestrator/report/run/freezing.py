"""Freezing in `report.html`: its gain, ratios as a heat map and over steps, how often parameters were
frozen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.analysis.freeze_numbers import FreezeNumbers, freeze_numbers
from orchestrator.events.types import sentence_of
from orchestrator.history.freeze_record import FrozenStep
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Point, Series
from orchestrator.pictures.heat_map import HeatMap, heat_map_of
from orchestrator.quantities import percent, seconds, significant
from orchestrator.report.parts import ReportNote, Table, Tile, tile
from orchestrator.report.run.layouts import layouts
from orchestrator.report.run.what_ran import plan_changes

BINS = 20

MOST_RANKS = 4
"""Most ranks with a histogram each; above that, one histogram for all."""


@dataclass(frozen=True)
class FreezingPart:
    """Freezing of a run, and its gain."""

    method: str
    notes: tuple[ReportNote, ...]
    tiles: tuple[Tile, ...]
    ratios: HeatMap | None
    worth: str
    """Gain of a higher `r_max`."""
    charts: tuple[Chart, ...]
    counts: tuple[Chart, ...]
    """Freeze counts of each parameter: TimelyFreeze, appendix H."""
    counted: str
    """The steps that the counts cover."""
    layouts: tuple[Table, ...] = ()
    """Pipelines and frozen layers over the steps."""


def freezing(run: JobView) -> FreezingPart | None:
    """The part; None if the job's method is `none`."""
    numbers = freeze_numbers(run)
    if numbers is None:
        return None
    counts, counted = _counts(run)
    tables, pipelines = layouts(run)
    return FreezingPart(
        method=numbers.method,
        notes=_notes(run, numbers),
        tiles=_tiles(run, numbers),
        ratios=_ratios(run),
        worth=_worth(run),
        charts=(*pipelines, *_over_steps(run)),
        counts=counts,
        counted=counted,
        layouts=tables,
    )


def _notes(run: JobView, numbers: FreezeNumbers) -> tuple[ReportNote, ...]:
    """Lines that readers must not miss: that freezing costs more than it brings, and why nothing is kept of what frozen
    layers compute."""
    notes = [] if numbers.warning is None else [ReportNote("warn", "Warning", numbers.warning)]
    newest = max(run.freeze.kept.values(), key=lambda kept: kept.step, default=None)
    if newest is not None and newest.why_not:
        notes.append(ReportNote("good", "Note", f"{sentence_of(newest)}."))
    return tuple(notes)


def _tiles(run: JobView, numbers: FreezeNumbers) -> tuple[Tile, ...]:
    entries: list[Tile] = []
    solved = run.freeze.solved
    unfrozen = "with the prefix alone" if numbers.above_prefix else "without freezing"
    if numbers.average_freeze_ratio is not None:
        entries.append(
            tile("Average freeze ratio", percent(numbers.average_freeze_ratio), "of scalars, over all steps")
        )
    if numbers.kappa is not None:
        predicted = numbers.predicted_kappa
        detail = f"step time over that {unfrozen}"
        if predicted is not None:
            detail += f"; predicted {predicted:.3f}"
        entries.append(tile("kappa", f"{numbers.kappa:.3f}", detail))
    elif numbers.predicted_kappa is not None:
        entries.append(tile("kappa", f"{numbers.predicted_kappa:.3f}", "predicted"))
    if numbers.p_eff is not None:
        detail = "share of gradient energy let through"
        if solved is not None and solved.p_eff is not None:
            detail += f"; predicted{' above the prefix' * numbers.above_prefix} {solved.p_eff:.3f}"
        entries.append(tile("p_eff", f"{numbers.p_eff:.3f}", detail))
    if numbers.progress is not None:
        entries.append(tile("Progress", f"{numbers.progress:.3f}", f"of a step {unfrozen}, predicted"))
    if numbers.time_to_accuracy is not None:
        if math.isinf(numbers.time_to_accuracy):
            entries.append(tile("Time to accuracy", "∞", "no update is let through"))
        else:
            entries.append(
                tile(
                    "Time to accuracy", f"{numbers.time_to_accuracy:.3f}", f"predicted, over that {unfrozen}"
                )
            )
    prefix = run.freeze.prefix
    if prefix is not None:
        of = f" of {run.plan.layers[-1][1]:,}" if run.plan is not None else ""
        entries.append(
            tile(
                "Frozen prefix",
                f"{prefix.layers:,}{of}",
                f"layers that go forward only, since step {prefix.step:,}",
            )
        )
    if solved is not None:
        entries.append(
            tile(
                "Window, solved",
                seconds(solved.solved_s),
                f"unfrozen {seconds(solved.unfrozen_s)}, all frozen {seconds(solved.all_frozen_s)}",
            )
        )
        entries.append(tile("Solved in", seconds(solved.solve_s), f"{len(solved.ratios):,} actions"))
    return tuple(entries)


def _ratios(run: JobView) -> HeatMap | None:
    """The heat map of the freeze program's solution; without one, of the newest steps."""
    solved = run.freeze.solved
    ratios = list(solved.ratios) if solved is not None else run.freeze.recent_ratios()
    if not ratios:
        return None
    if solved is None:
        title = "Share of weight-gradient time frozen in recent steps"
    else:
        title = "Share of weight-gradient time to freeze"
        if run.freeze.start is not None:
            title += f", from step {run.freeze.start:,} on"
    return heat_map_of(ratios, title)


def _worth(run: JobView) -> str:
    solved = run.freeze.solved
    if solved is None or not any(dual > 0 for dual in solved.duals):
        return ""
    duals = ", ".join(
        f"stage {stage} {seconds(dual / 10)}" for stage, dual in enumerate(solved.duals) if dual > 0
    )
    return f"Raising r_max by 0.1 would shorten a window by about: {duals}."


def _over_steps(run: JobView) -> tuple[Chart, ...]:
    """The frozen prefix, planned and actual ratio, and the share of the gradient's energy that got through, over all
    steps."""
    if not run.steps:
        return ()
    changes = plan_changes(run)
    prefix = _prefix(run, changes)
    if not run.freeze.steps:
        return prefix
    frozen = {step: run.freeze.steps.get(step, FrozenStep()) for step in sorted(run.steps)}
    ratio = Chart(
        title="Freeze ratio",
        unit="% of weight-gradient time",
        series=(
            Series(name="planned", points=_percents(frozen, lambda of: of.planned)),
            Series(name="actual", points=_percents(frozen, lambda of: of.actual)),
        ),
        format=significant,
        from_zero=True,
        bands=run.phases,
        changes=changes,
    )
    if not any(report.gradient_energy > 0 for report in run.steps.values()):
        return (*prefix, ratio)
    points = tuple((step, run.steps[step].effective_update) for step in frozen)
    update = Chart(
        title="Effective update (p_eff)",
        unit="share of gradient energy",
        series=(Series(name="p_eff", points=points),),
        format=significant,
        from_zero=True,
        bands=run.phases,
        changes=changes,
    )
    return *prefix, ratio, update


def _prefix(run: JobView, changes: tuple[int, ...]) -> tuple[Chart, ...]:
    """Layers frozen as a whole, over all steps; empty where there never were any."""
    if not run.freeze.prefixes:
        return ()
    steps = sorted(run.steps)
    moved = sorted(run.freeze.prefixes.items())
    points = tuple(
        (step, float(next((prefix.layers for first, prefix in reversed(moved) if first <= step), 0)))
        for step in steps
    )
    return (
        Chart(
            title="Frozen prefix",
            unit="layers that go forward only",
            series=(Series(name="layers", points=points),),
            format=lambda count: f"{count:,.0f}",
            from_zero=True,
            bands=run.phases,
            changes=changes,
        ),
    )


def _percents(frozen: Mapping[int, FrozenStep], total: Callable[[FrozenStep], float]) -> tuple[Point, ...]:
    return tuple((step, 100 * total(of) / max(of.actions, 1)) for step, of in frozen.items())


def _counts(run: JobView) -> tuple[tuple[Chart, ...], str]:
    """A histogram per rank, or one for all; and the steps that they cover, in words."""
    by_rank, counted = _frozen_shares(run)
    if len(by_rank) > MOST_RANKS:
        shown = [("All ranks", [share for shares in by_rank.values() for share in shares])]
    else:
        shown = [(f"Rank {rank}", shares) for rank, shares in sorted(by_rank.items())]
    charts = tuple(
        histogram(shares, f"{name}: how often each parameter was frozen", "parameters")
        for name, shares in shown
    )
    return charts, counted


def _frozen_shares(run: JobView) -> tuple[dict[int, list[float]], str]:
    """(rank -> for each parameter of the layers that it last held, the share of backward passes in which it
    was frozen; the steps covered, in words)."""
    counted = run.frozen_counts()
    if counted is None:
        return {}, ""
    shares: dict[int, list[float]] = defaultdict(list)
    for layer in counted.layers.values():
        if layer.passes:
            shares[layer.rank] += [count / layer.passes for count in layer.counts]
    text = f"Over all {counted.steps:,} steps; each layer counts at the rank that held it last."
    if counted.whole < counted.steps:
        text += f" Complete for {counted.whole:,} of them; in the others, a lost rank had not yet reported its counts."
    return shares, text


def bins(shares: Sequence[float]) -> list[int]:
    """Number of `shares`, each in [0, 1], in each of `BINS` equal bins; 1 belongs to the last bin."""
    counts = [0] * BINS
    for share in shares:
        counts[min(int(share * BINS + 1e-9), BINS - 1)] += 1
    return counts


def histogram(shares: Sequence[float], title: str, unit: str) -> Chart:
    """A chart with one bar per five percent.

    Args:
        shares: in [0, 1]; not empty.
        unit: the unit of the counts.
    """
    width = 100 / BINS
    points = tuple(((number + 0.5) * width, float(count)) for number, count in enumerate(bins(shares)))
    mean = sum(shares) / len(shares)
    return Chart(
        title=title,
        unit=unit,
        series=(Series(name=unit, points=points),),
        format=lambda count: f"{count:,.0f}",
        kind="bars",
        from_zero=True,
        axis="% of its backward passes",
        axis_range=(0.0, 100.0),
        description=(
            f"{title}: {len(shares):,} in all, frozen in {100 * min(shares):.1f} to {100 * max(shares):.1f} % of"
            f" their backward passes, {100 * mean:.1f} % on average."
        ),
    )
