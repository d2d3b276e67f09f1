"""A what-if as a page shows it: numbers beside each other, one picture, memory. Facts only."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.analysis.idle_causes import IdleCauses
from orchestrator.analysis.step_causes import simulated_causes
from orchestrator.analysis.what_if import Case, WhatIf
from orchestrator.pictures.timeline_svg import Step
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.quantities import percent, seconds, size
from orchestrator.report.parts import Cell, Column, Pill, Table
from orchestrator.report.run.rank_memory import RankPeak, memory_of
from orchestrator.report.step.idle_table import idle_table
from planner.freezing import budget_text


@dataclass(frozen=True)
class WhatIfPart:
    """Today and the change."""

    numbers: Table
    words: str
    """Both steps and how they compare."""
    timelines: TimelineView
    idle: tuple[Table, Table]
    """Idle time by cause, today and in the changed case."""
    now_memory: tuple[RankPeak, ...]
    then_memory: tuple[RankPeak, ...]


def what_if_part(found: WhatIf) -> WhatIfPart:
    """`found` as facts."""
    now, then = (simulated_causes(case.prediction.simulation) for case in (found.now, found.then))
    steps = [_step("today", found.now, now), _step("changed", found.then, then)]
    return WhatIfPart(
        numbers=numbers(found),
        words=words(found),
        timelines=TimelineView("", steps),
        idle=(idle_table(now, "today's"), idle_table(then, "changed")),
        now_memory=memory_of(found.now.prediction),
        then_memory=memory_of(found.then.prediction),
    )


def words(found: WhatIf) -> str:
    """E.g. `a step is predicted to take 231 ms now and 310 ms then, 34.2 % longer`."""
    now, then = found.now.prediction.step_s, found.then.prediction.step_s
    change = then / now - 1
    how = (
        "as long" if abs(change) < 5e-4 else f"{percent(abs(change))} {'longer' if change > 0 else 'shorter'}"
    )
    return f"a step is predicted to take {seconds(now)} now and {seconds(then)} then, {how}"


def numbers(found: WhatIf) -> Table:
    """A row per figure."""
    now, then = _column(found.now), _column(found.then)
    return Table(
        label="Today and the change",
        columns=(Column(""), Column("Today", "number"), Column("Changed", "number")),
        rows=tuple((figure, now[figure], then[figure]) for figure in now),
    )


def _column(case: Case) -> dict[str, Cell]:
    prediction, plan = case.prediction, case.plan
    peak = max(prediction.memory.peak_bytes)
    return {
        "Predicted step": seconds(prediction.step_s),
        "Without ratios": seconds(case.unfrozen_s),
        "Bubble": percent(prediction.bubble),
        "Ranks of a pipeline": str(plan.pipeline_ranks),
        "Schedule": plan.schedule,
        "Layers per stage": " + ".join(map(str, case.cut)),
        "r_max": budget_text(case.r_max) if case.r_max else "no ratios",
        "Layers frozen as a whole": str(case.whole),
        "Peak memory of the fullest rank": size(peak),
        "Memory": Pill("fits", "good") if prediction.fits else Pill("does not fit", "bad"),
    }


def _step(name: str, case: Case, causes: IdleCauses) -> Step:
    prediction = case.prediction
    timeline, memory = prediction.simulation.timeline, prediction.memory_over_time()
    return Step(name, timeline, None, case.ratios, memory, causes.critical.spans)
