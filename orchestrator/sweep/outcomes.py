"""Outcomes of the jobs of a sweep, for its CSV and its page. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from orchestrator.quantities import percent, rate, seconds, significant
from orchestrator.report.parts import Cell as TableCell
from orchestrator.report.parts import Column, Pill, Table
from orchestrator.sweep.grid import Cell


@dataclass(frozen=True, kw_only=True)
class SweptJob:
    """One job of a sweep."""

    cell: Cell
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By name, those that the job has."""
    frozen_by: str = "none"
    """Its freeze method."""
    error: str = ""
    """Why it has none: the last that it said; empty if it is done."""


@dataclass(frozen=True, kw_only=True)
class SettingOutcome:
    """The jobs of one setting, one for each seed."""

    settings: tuple[tuple[str, str], ...]
    """(key, value) of each key of the grid, in its order."""
    jobs: tuple[SweptJob, ...]
    over_none: float | None = None
    """Throughput over that of the settings that freeze nothing and are else the same, by means of each; None: some have
    none."""

    @property
    def values(self) -> tuple[str, ...]:
        """The values alone."""
        return tuple(value for _, value in self.settings)

    @property
    def beside_freezing(self) -> tuple[tuple[str, str], ...]:
        """The settings that are not of freezing."""
        return tuple((key, value) for key, value in self.settings if not key.startswith("freeze."))

    @property
    def frozen_by(self) -> str:
        """The freeze method of its jobs."""
        return next((job.frozen_by for job in self.jobs if not job.error), "none")

    @property
    def loss(self) -> float | None:
        """Mean validation loss; None where no job has one."""
        found = [value for value in self.numbers("loss") if math.isfinite(value)]
        return mean(found) if found else None

    def numbers(self, name: str) -> list[float]:
        """The number `name` of the jobs that have it."""
        return [job.numbers[name] for job in self.jobs if name in job.numbers]


def by_setting(outcomes: Sequence[SweptJob]) -> tuple[SettingOutcome, ...]:
    """The settings, in the order in which they come."""
    found: dict[tuple[tuple[str, str], ...], list[SweptJob]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.cell.settings, []).append(outcome)
    every = [SettingOutcome(settings=settings, jobs=tuple(jobs)) for settings, jobs in found.items()]
    free: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for each in every:
        if each.frozen_by == "none":
            free.setdefault(each.beside_freezing, []).extend(each.numbers("per_s"))
    return tuple(
        replace(each, over_none=mean(speeds) / mean(beside))
        if (beside := free.get(each.beside_freezing)) and (speeds := each.numbers("per_s"))
        else each
        for each in every
    )


def outcome_of(cell: Cell, summary: Mapping[str, Any], method: str) -> SweptJob:
    """The outcome of a job whose `--summary` is this.

    Args:
        method: the freeze method that it was asked for; it may have ended with nothing frozen.
    """
    freeze = summary.get("freeze") or {}
    told = {
        "per_s": summary.get("tokens_per_s"),
        "step_s": summary.get("step_time_s"),
        "loss": summary.get("validation_loss"),
        **(summary.get("metrics") or {}),
        "time_to_target_s": summary.get("time_to_target_s"),
        "frozen": freeze.get("average_freeze_ratio"),
        "kappa": freeze.get("kappa"),
        "p_eff": freeze.get("p_eff"),
    }
    numbers = {name: float(value) for name, value in told.items() if value is not None}
    return SweptJob(cell=cell, numbers=numbers, frozen_by=method)


def csv_text(outcomes: Sequence[SweptJob]) -> str:
    """A row per job: its settings, its numbers, and why it has none."""
    keys = [key for key, _ in outcomes[0].cell.settings]
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.numbers))
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow([*keys, "job.seed", *names, "error"])
    for outcome in outcomes:
        seed = "" if outcome.cell.seed is None else outcome.cell.seed
        values = [value for _, value in outcome.cell.settings]
        rows.writerow([*values, seed, *(outcome.numbers.get(name, "") for name in names), outcome.error])
    return out.getvalue()


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("per_s", "Throughput", lambda value: f"{rate(value)}/s"),
    ("step_s", "Step", seconds),
    ("loss", "Validation loss", lambda value: f"{value:.4f}"),
    ("time_to_target_s", "Time to target", seconds),
    ("frozen", "Frozen", percent),
    ("kappa", "kappa", lambda value: f"{value:.3f}"),
    ("p_eff", "p_eff", lambda value: f"{value:.3f}"),
)


def table(outcomes: Sequence[SweptJob]) -> Table:
    """A row per setting: the mean over its seeds, with the least and the greatest where they differ; and how many times
    as fast it trains as the settings that freeze nothing."""
    keys = [key for key, _ in outcomes[0].cell.settings]
    metrics = dict.fromkeys(name for each in outcomes for name in each.numbers if name not in dict(_known()))
    shown = [
        *_SHOWN[:3],
        *((name, name, significant) for name in metrics),
        *_SHOWN[3:],
    ]
    shown = [row for row in shown if any(row[0] in each.numbers for each in outcomes)]
    settings = by_setting(outcomes)
    over = any(each.over_none is not None and each.frozen_by != "none" for each in settings)
    columns = [*map(Column, keys), *(Column(title, "number") for _, title, _ in shown)]
    columns += [Column("Over none", "number")] if over else []
    rows: list[tuple[TableCell, ...]] = []
    for setting in settings:
        cells: list[TableCell] = [*setting.values]
        cells += [_spread(setting.numbers(name), show) for name, _, show in shown]
        if over:
            cells.append("–" if setting.over_none is None else f"{setting.over_none:.2f}")
        failed = [job.error for job in setting.jobs if job.error]
        rows.append(
            (*cells, Pill(f"{len(failed)} not done: {failed[0]}", "bad") if failed else Pill("done", "good"))
        )
    return Table(label="Settings", columns=(*columns, Column("Jobs")), rows=tuple(rows))


def _known() -> list[tuple[str, str]]:
    return [(name, title) for name, title, _ in _SHOWN]


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    least, most = show(min(finite)), show(max(finite))
    return show(mean(finite)) if least == most else f"{show(mean(finite))} ({least} to {most})"
