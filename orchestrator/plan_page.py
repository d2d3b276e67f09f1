"""The predicted timeline of a plan as a file: SVG, a page, or a trace for Perfetto, by the file's suffix."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from orchestrator.picture_page import picture_page, write_form
from orchestrator.planning import Freezing
from orchestrator.quantities import percent, seconds
from planner.heat_map import heat_map_svg
from planner.picture import svg
from planner.search import Choice
from planner.trace import action_lanes, chrome_trace, link_lanes


def write_timeline(path: Path, choice: Choice, freezing: Freezing) -> None:
    """Write the timeline of a step of `choice` to `path`.

    Raises:
        JobError: the suffix is not one of those known, or the file cannot be written.
    """
    forms = {".svg": _svg, ".html": _html, ".json": _trace}
    write_form(path, "--timeline", {s: partial(form, choice, freezing) for s, form in forms.items()})


def _svg(choice: Choice, freezing: Freezing) -> str:
    frozen = freezing.ratios if freezing.freezes else ()
    return svg(freezing.prediction.simulation.timeline, _title(choice, freezing), frozen=frozen)


def _trace(choice: Choice, freezing: Freezing) -> str:
    simulation = choice.prediction.simulation
    lanes = [*action_lanes("predicted", simulation.timeline), *link_lanes("links", simulation)]
    if freezing.freezes:
        simulation = freezing.prediction.simulation
        lanes += action_lanes("predicted, frozen", simulation.timeline, freezing.ratios)
        lanes += link_lanes("links, frozen", simulation)
    return chrome_trace(lanes)


def _html(choice: Choice, freezing: Freezing) -> str:
    plan = choice.plan
    pictures = [svg(choice.prediction.simulation.timeline, "A step with nothing frozen")]
    if freezing.freezes:
        pictures += [_svg(choice, freezing), heat_map_svg(freezing.ratios, "Frozen shares")]
    title = f"{plan.schedule} · Freshet plan"
    return picture_page(title, _title(choice, freezing), plan.reason, pictures)


def _title(choice: Choice, freezing: Freezing) -> str:
    plan = choice.plan
    frozen = f", {seconds(freezing.prediction.step_s)} with freezing" if freezing.freezes else ""
    return (
        f"{plan.schedule}: {plan.stages} stages on {plan.pipeline_ranks} ranks, {plan.microbatches} microbatches,"
        f" predicted step {seconds(choice.prediction.step_s)}{frozen},"
        f" bubble {percent(choice.prediction.bubble)}"
    )
