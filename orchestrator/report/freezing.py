"""Freezing in `report.html`: what it brought, ratios as a heat map and over steps, how often parameters froze."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from html import escape

from orchestrator.analysis.freeze_numbers import FreezeNumbers, freeze_numbers
from orchestrator.history.freeze_record import FrozenStep
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Point, Series
from orchestrator.pictures.heat_map import heat_map_svg
from orchestrator.pictures.histogram import histogram
from orchestrator.quantities import percent, seconds, significant
from orchestrator.report.parts import figure, inline, tile

MOST_RANKS = 4
"""A histogram per rank up to so many ranks; one for all above."""


def freezing(run: JobView) -> str:
    """The whole part; empty if the job's method is `none`."""
    numbers = freeze_numbers(run)
    if numbers is None:
        return ""
    warning = ""
    if numbers.warning is not None:
        warning = f'<ul class="notes"><li class="warn"><b>Warning</b>{escape(numbers.warning)}</li></ul>'
    parts = [warning, _tiles(run, numbers), _ratios(run), _over_steps(run), _counts(run)]
    return (
        f"<section><h2>Freezing<small>{escape(numbers.method)}</small></h2>"
        + "".join(part for part in parts if part)
        + "</section>"
    )


def _tiles(run: JobView, numbers: FreezeNumbers) -> str:
    entries: list[tuple[str, str, str]] = []
    solved = run.freeze.solved
    if numbers.average_freeze_ratio is not None:
        entries.append(
            ("Average freeze ratio", percent(numbers.average_freeze_ratio), "of scalars, over all steps")
        )
    if numbers.kappa is not None:
        told = numbers.predicted_kappa
        detail = (
            "step time over unfrozen" if told is None else f"step time over unfrozen; predicted {told:.3f}"
        )
        entries.append(("kappa", f"{numbers.kappa:.3f}", detail))
    elif numbers.predicted_kappa is not None:
        entries.append(("kappa", f"{numbers.predicted_kappa:.3f}", "predicted"))
    if numbers.p_eff is not None:
        entries.append(("p_eff", f"{numbers.p_eff:.3f}", "share of gradient energy let through"))
    if numbers.time_to_accuracy is not None:
        if math.isinf(numbers.time_to_accuracy):
            entries.append(("Time to accuracy", "∞", "no update is let through"))
        else:
            entries.append(
                ("Time to accuracy", f"{numbers.time_to_accuracy:.3f}", "predicted, over no freezing")
            )
    if solved is not None:
        entries.append(
            (
                "Window, solved",
                seconds(solved.solved_s),
                f"unfrozen {seconds(solved.unfrozen_s)}, all frozen {seconds(solved.all_frozen_s)}",
            )
        )
        entries.append(("Solved in", seconds(solved.solve_s), f"{len(solved.ratios):,} actions"))
    items = "".join(tile(*entry) for entry in entries)
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _ratios(run: JobView) -> str:
    """The heat map: as solved for, or as drawn where nothing was solved for."""
    solved = run.freeze.solved
    ratios = list(solved.ratios) if solved is not None else run.freeze.recent_ratios()
    if not ratios:
        return ""
    title = (
        "share of weight-gradient time to freeze"
        if solved
        else "share of weight-gradient time frozen of late"
    )
    if solved is not None and run.freeze.start is not None:
        title += f", from step {run.freeze.start:,} on"
    worth = ""
    if solved is not None and any(dual > 0 for dual in solved.duals):
        duals = ", ".join(
            f"stage {stage} {seconds(dual / 10)}" for stage, dual in enumerate(solved.duals) if dual > 0
        )
        worth = (
            f'<p class="caption">Raising r_max by 0.1 would shorten a window by about: {escape(duals)}.</p>'
        )
    return (
        '<div class="card scroll picture after" tabindex="0" role="region" aria-label="Freeze ratios">'
        f"{inline(heat_map_svg(ratios, title))}{worth}</div>"
    )


def _over_steps(run: JobView) -> str:
    """Planned and actual ratio, and what share of the gradient's energy got through, over all steps."""
    if not run.freeze.steps or not run.steps:
        return ""
    frozen = {step: run.freeze.steps.get(step, FrozenStep()) for step in sorted(run.steps)}
    drawn = [
        Chart(
            title="Freeze ratio",
            unit="% of weight-gradient time",
            series=(
                Series(name="planned", points=_percents(frozen, lambda of: of.planned)),
                Series(name="actual", points=_percents(frozen, lambda of: of.actual)),
            ),
            format=significant,
            from_zero=True,
            bands=run.phases,
        )
    ]
    if any(report.gradient_energy > 0 for report in run.steps.values()):
        points = tuple((step, run.steps[step].effective_update) for step in frozen)
        drawn.append(
            Chart(
                title="Effective update",
                unit="share of gradient energy let through (p_eff)",
                series=(Series(name="p_eff", points=points),),
                format=significant,
                from_zero=True,
                bands=run.phases,
            )
        )
    return f'<div class="charts after">{"".join(map(figure, drawn))}</div>'


def _percents(frozen: Mapping[int, FrozenStep], total: Callable[[FrozenStep], float]) -> tuple[Point, ...]:
    return tuple((step, 100 * total(of) / max(of.actions, 1)) for step, of in frozen.items())


def _counts(run: JobView) -> str:
    """How often each parameter was frozen: TimelyFreeze, appendix H."""
    by_rank, told = _frozen_shares(run)
    if not by_rank:
        return ""
    if len(by_rank) > MOST_RANKS:
        shown = [("All ranks", [share for shares in by_rank.values() for share in shares])]
    else:
        shown = [(f"Rank {rank}", shares) for rank, shares in sorted(by_rank.items())]
    figures = "".join(
        f'<figure class="card"><figcaption><h3>{name}: how often each parameter was frozen</h3></figcaption>'
        f"{histogram(shares, f'{name}: how often each parameter was frozen', 'parameters')}</figure>"
        for name, shares in shown
    )
    return f'<div class="charts after">{figures}</div><p class="caption">{escape(told)}</p>'


def _frozen_shares(run: JobView) -> tuple[dict[int, list[float]], str]:
    """(rank -> per parameter of the layers that it held last, the share of backward passes in which it was frozen; over
    which steps, in words)."""
    counted = run.frozen_counts()
    if counted is None:
        return {}, ""
    shares: dict[int, list[float]] = defaultdict(list)
    for layer in counted.layers.values():
        if layer.passes:
            shares[layer.rank] += [count / layer.passes for count in layer.counts]
    told = f"Over all {counted.steps:,} steps; each layer counts where it was held last."
    if counted.whole < counted.steps:
        told += (
            f" Whole for {counted.whole:,} of them: what a rank had not yet told of when it was lost is missing in the"
            " others."
        )
    return shares, told
