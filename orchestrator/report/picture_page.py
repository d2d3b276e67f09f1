"""A page of one step's pictures: `freshet timeline --out step.html` and `freshet plan --timeline
plan.html`."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from orchestrator.pictures.heat_map import HeatMap
from orchestrator.pictures.timeline_picture import Picture
from orchestrator.report.assets import render_page


def picture_page(
    title: str, heading: str, text: str, pictures: Sequence[Picture], ratios: HeatMap | None = None
) -> str:
    """HTML with `pictures` below each other, and `ratios` at the end."""
    drawn = [Markup(picture.svg(inline=True)) for picture in pictures]
    facts = {"title": title, "heading": heading, "text": text, "pictures": drawn, "ratios": ratios}
    return render_page("picture.html.j2", facts, charts=False)
