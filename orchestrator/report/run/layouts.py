"""Pipelines of a run and its frozen prefix over the steps, in `report.html`: what each change cost and brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import Band
from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import seconds
from orchestrator.report.parts import Column, Table
from orchestrator.report.run.what_ran import plan_changes
from planner.plan import Plan
from planner.wording import counted

Value = TypeVar("Value")

MOST_ROWS = 40
"""Newest stretches of steps that are shown."""


@dataclass(frozen=True)
class Stretch:
    """Steps of one layout and one prefix."""

    first: int
    frozen: int
    """Layers that go forward only."""
    pipelines: int
    ranks: int
    """Ranks of each pipeline."""
    replicas: int
    """Replicas of a step, whoever executes them."""
    samples: int
    """Samples of a step; 0: unknown."""
    schedule: str
    cost_s: float | None
    """Pause of training before it; None: the ranks did not regroup."""
    step_s: float | None
    """Median of its steps; None: none is left in the log."""
    found: int = 0
    """Microbatches of which what frozen layers make was kept."""
    passed: int = 0
    """Microbatches that went through frozen layers from the first one on, or from what was kept of fewer."""

    @property
    def sample_s(self) -> float | None:
        """Time of a step for each of its samples, or of a whole one if those are unknown."""
        return None if self.step_s is None else self.step_s / (self.samples or 1)


def layouts(run: JobView) -> tuple[tuple[Table, ...], tuple[Chart, ...]]:
    """The tables of stretches and of layouts that were weighed, and the chart of pipelines; empty where no layer was
    ever frozen as a whole."""
    if not run.freeze.prefixes or not run.steps:
        return (), ()
    found = stretches(run)
    return (_table(found), *_weighed(run)), _charts(run, found)


def stretches(run: JobView) -> tuple[Stretch, ...]:
    """The run's stretches, by step."""
    plans, course = _plans(run), run.course
    prefixes = {first: prefix.layers for first, prefix in run.freeze.prefixes.items()}
    paused = {
        event.step + 1: event.detect_s + event.settle_s + event.plan_s + event.move_s + event.resume_s
        for each in run.recovery.regroupings
        if (event := each.regrouped) is not None
    }
    begins = sorted({1, *plans, *(max(1, first) for first in prefixes)})
    found: list[Stretch] = []
    for number, first in enumerate(begins):
        stop = begins[number + 1] if number + 1 < len(begins) else run.step + 1
        plan = _newest(plans, first)
        if plan is None:
            continue
        times = [report.step_s for step, report in run.steps.items() if first <= step < stop]
        used = [each for step, each in run.freeze.used.items() if first < step <= stop]
        found.append(
            Stretch(
                first=first,
                frozen=_newest(prefixes, first) or 0,
                pipelines=plan.pipeline_count,
                ranks=plan.pipeline_ranks,
                replicas=plan.replicas if course is None else course.at(first).replicas,
                samples=0 if course is None else course.at(first).batch,
                schedule=plan.schedule,
                cost_s=paused.get(first),
                step_s=median(times) if times else None,
                found=sum(each.found for each in used),
                passed=sum(each.passed for each in used),
            )
        )
    return tuple(found)


def _plans(run: JobView) -> dict[int, Plan]:
    """The plans that changed the layout, by the first step that followed each."""
    found: dict[int, Plan] = {}
    before: tuple[object, ...] | None = None
    for decision in run.decisions:
        plan = decision.plan
        layout = (plan.pipeline_count, plan.pipeline_ranks, plan.schedule, plan.layers)
        if layout != before:
            found[decision.step + 1] = plan
        before = layout
    return found


def _newest(by_step: Mapping[int, Value], step: int) -> Value | None:
    """The entry that holds for `step`."""
    return next((by_step[first] for first in sorted(by_step, reverse=True) if first <= step), None)


def _table(found: tuple[Stretch, ...]) -> Table:
    shown = found[-MOST_ROWS:]
    begun_s = next((each.sample_s for each in found if each.sample_s is not None), None)
    rows = tuple(
        (
            f"{each.first:,}",
            f"{each.frozen:,}",
            f"{each.pipelines:,} x {counted(each.ranks, 'rank')}",
            f"{each.replicas:,}",
            each.schedule,
            "–" if each.step_s is None else seconds(each.step_s),
            "–" if each.sample_s is None or begun_s is None else f"{begun_s / each.sample_s:.2f}",
            "–" if each.cost_s is None else seconds(each.cost_s),
            f"{each.found:,} of {each.found + each.passed:,}" if each.found + each.passed else "–",
        )
        for each in shown
    )
    left = len(found) - len(shown)
    return Table(
        label="Pipelines and frozen layers over the steps",
        columns=(
            Column("From step", "number"),
            Column("Frozen layers", "number"),
            Column("Pipelines"),
            Column("Replicas", "number"),
            Column("Schedule"),
            Column("Step, median", "number"),
            Column("Times as fast", "number"),
            Column("Pause before", "number"),
            Column("Found kept", "number"),
        ),
        rows=rows,
        more=f"{counted(left, 'earlier stretch', 'earlier stretches')} left out" if left else "",
    )


def _weighed(run: JobView) -> tuple[Table, ...]:
    """The other layouts that were weighed as layers froze or thawed; none of a job that never weighed one."""
    if not run.freeze.weighed:
        return ()
    return (
        Table(
            label="Other layouts that were weighed",
            columns=(Column("Layers frozen from step", "number"), Column("Taken"), Column("Why")),
            rows=tuple(
                (f"{each.prefix:,}", "yes" if each.pays else "no", each.reason) for each in run.freeze.weighed
            ),
        ),
    )


def _charts(run: JobView, found: tuple[Stretch, ...]) -> tuple[Chart, ...]:
    """Pipelines, the ranks of each and, where the batch grows, replicas over the steps; empty where they never
    changed."""
    if len({(each.pipelines, each.ranks, each.replicas) for each in found}) < 2:
        return ()
    by_first = {each.first: each for each in found}
    of_step = [(step, _newest(by_first, step)) for step in sorted(run.steps)]
    known = [(step, each) for step, each in of_step if each is not None]
    bands: tuple[Band, ...] = run.phases
    lines: dict[str, Callable[[Stretch], int]] = {
        "pipelines": lambda each: each.pipelines,
        "ranks of each": lambda each: each.ranks,
    }
    if len({each.replicas for each in found}) > 1:
        lines["replicas"] = lambda each: each.replicas
    return (
        Chart(
            title="Pipelines",
            unit="pipelines, and ranks of each",
            series=tuple(
                Series(name=name, points=tuple((step, float(line(each))) for step, each in known))
                for name, line in lines.items()
            ),
            format=lambda count: f"{count:,.0f}",
            from_zero=True,
            bands=bands,
            changes=plan_changes(run),
        ),
    )
