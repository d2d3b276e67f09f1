"""The predicted timeline of a plan as a file: SVG, a page, or a trace for Perfetto, by the file's suffix."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from orchestrator.pictures.heat_map import Shares, heat_map_svg
from orchestrator.pictures.page import picture_page, write_form
from orchestrator.pictures.perfetto import action_lanes, chrome_trace, link_lanes, memory_counters
from orchestrator.pictures.timeline_svg import svg
from orchestrator.prepare.planning import Freezing
from orchestrator.quantities import percent, seconds
from planner.search.search import Choice
from planner.simulation.predict import Prediction


def write_timeline(path: Path, choice: Choice, freezing: Freezing) -> None:
    """Write the timeline of a step of `choice` to `path`.

    Raises:
        JobError: the suffix is not one of those known, or the file cannot be written.
    """
    forms = {".svg": _svg, ".html": _html, ".json": _trace}
    write_form(path, "--timeline", {s: partial(form, choice, freezing) for s, form in forms.items()})


def _svg(choice: Choice, freezing: Freezing) -> str:
    frozen = freezing.ratios if freezing.freezes else ()
    return _picture(freezing.prediction, _title(choice, freezing), frozen)


def _trace(choice: Choice, freezing: Freezing) -> str:
    simulation = choice.prediction.simulation
    lanes = [*action_lanes("predicted", simulation.timeline), *link_lanes("links", simulation)]
    counters = memory_counters("predicted", choice.prediction.memory_over_time())
    if freezing.freezes:
        simulation = freezing.prediction.simulation
        lanes += action_lanes("predicted, frozen", simulation.timeline, freezing.ratios)
        lanes += link_lanes("links, frozen", simulation)
        counters += memory_counters("predicted, frozen", freezing.prediction.memory_over_time())
    return chrome_trace(lanes, counters)


def _html(choice: Choice, freezing: Freezing) -> str:
    plan = choice.plan
    pictures = [_picture(choice.prediction, "A step with nothing frozen")]
    if freezing.freezes:
        pictures += [_svg(choice, freezing), heat_map_svg(freezing.ratios, "Frozen shares")]
    title = f"{plan.schedule} · Freshet plan"
    return picture_page(title, _title(choice, freezing), plan.reason, pictures)


def _picture(prediction: Prediction, title: str, frozen: Shares = ()) -> str:
    return svg(prediction.simulation.timeline, title, frozen=frozen, memory=prediction.memory_over_time())


def _title(choice: Choice, freezing: Freezing) -> str:
    plan = choice.plan
    frozen = f", {seconds(freezing.prediction.step_s)} with freezing" if freezing.freezes else ""
    return (
        f"{plan.schedule}: {plan.stages} stages on {plan.pipeline_ranks} ranks, {plan.microbatches} microbatches,"
        f" predicted step {seconds(choice.prediction.step_s)}{frozen},"
        f" bubble {percent(choice.prediction.bubble)}"
    )
