"""A page of one step's pictures: `freshet timeline --out step.html` and `freshet plan --timeline
plan.html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.pictures.heat_map import HeatMap
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.report.assets import render_page
from orchestrator.report.parts import Table


@dataclass(frozen=True)
class Drawn:
    """A timeline, and idle time by cause below it."""

    view: TimelineView
    idle: Table | None


def picture_page(
    title: str, heading: str, text: str, pictures: Sequence[Drawn], ratios: HeatMap | None = None
) -> str:
    """HTML with `pictures` below each other, and `ratios` at the end."""
    facts = {"title": title, "heading": heading, "text": text, "pictures": pictures, "ratios": ratios}
    return render_page("picture.html.j2", facts, timelines=True)
