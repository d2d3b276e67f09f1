"""The predicted timeline of a plan as a file: SVG, a page, or a trace for Perfetto, by the file's suffix."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from orchestrator.analysis.idle_causes import IdleCauses
from orchestrator.analysis.step_causes import simulated_causes
from orchestrator.pictures.forms import write_form
from orchestrator.pictures.heat_map import Shares, heat_map_of
from orchestrator.pictures.perfetto import action_lanes, chrome_trace, link_lanes, memory_counters
from orchestrator.pictures.timeline_svg import Step, picture
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.prepare.planning import Freezing
from orchestrator.quantities import percent, seconds
from orchestrator.report.step.idle_table import idle_table
from orchestrator.report.step.picture_page import Drawn, picture_page
from planner.search.search import ChosenPlan
from planner.simulation.predict import Prediction
from planner.wording import counted


def write_timeline(path: Path, choice: ChosenPlan, freezing: Freezing) -> None:
    """Write the timeline of a step of `choice` to `path`.

    Raises:
        JobError: the suffix is unknown, or the file cannot be written.
    """
    forms = {".svg": _svg, ".html": _html, ".json": _trace}
    write_form(path, "--timeline", {s: partial(form, choice, freezing) for s, form in forms.items()})


def _svg(choice: ChosenPlan, freezing: Freezing) -> str:
    frozen = freezing.ratios if freezing.freezes else ()
    found = simulated_causes(freezing.prediction.simulation)
    return picture([_step(freezing.prediction, frozen, found)], _title(choice, freezing)).svg()


def _trace(choice: ChosenPlan, freezing: Freezing) -> str:
    simulation = choice.prediction.simulation
    lanes = [*action_lanes("predicted", simulation.timeline), *link_lanes("links", simulation)]
    counters = memory_counters("predicted", choice.prediction.memory_over_time())
    if freezing.freezes:
        simulation = freezing.prediction.simulation
        lanes += action_lanes("predicted, frozen", simulation.timeline, freezing.ratios)
        lanes += link_lanes("links, frozen", simulation)
        counters += memory_counters("predicted, frozen", freezing.prediction.memory_over_time())
    return chrome_trace(lanes, counters)


def _html(choice: ChosenPlan, freezing: Freezing) -> str:
    plan = choice.plan
    pictures = [_drawn(choice.prediction, "A step with nothing frozen")]
    ratios = None
    if freezing.freezes:
        pictures.append(_drawn(freezing.prediction, "A step with freezing", freezing.ratios))
        ratios = heat_map_of(freezing.ratios, "Share of weight-gradient time to freeze")
    title = f"{plan.schedule} · Freshet plan"
    return picture_page(title, _title(choice, freezing), plan.reason, pictures, ratios)


def _drawn(prediction: Prediction, title: str, frozen: Shares = ()) -> Drawn:
    found = simulated_causes(prediction.simulation)
    return Drawn(TimelineView(title, [_step(prediction, frozen, found)]), idle_table(found, "predicted"))


def _step(prediction: Prediction, frozen: Shares, found: IdleCauses) -> Step:
    critical = found.critical.spans
    return Step("", prediction.simulation.timeline, None, frozen, prediction.memory_over_time(), critical)


def _title(choice: ChosenPlan, freezing: Freezing) -> str:
    plan = choice.plan
    frozen = f", {seconds(freezing.prediction.step_s)} with freezing" if freezing.freezes else ""
    return (
        f"{plan.schedule}: {counted(plan.stages, 'stage')} on {counted(plan.pipeline_ranks, 'rank')},"
        f" {counted(plan.microbatches, 'microbatch', 'microbatches')},"
        f" predicted step {seconds(choice.prediction.step_s)}{frozen},"
        f" bubble {percent(choice.prediction.bubble)}"
    )
