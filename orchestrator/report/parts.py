"""Pieces of markup that several sections of `report.html` are made of."""

from __future__ import annotations

from html import escape

from orchestrator.pictures.charts import Chart, line_chart

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
"""Not needed inline; taken out so that the page names no address at all."""


def tile(name: str, figure: str, detail: str) -> str:
    """A figure with what it is and a word on it; the unit, if it has one, is set smaller."""
    number, _, unit = figure.partition(" ")
    small = f"<small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div><dt>{name}</dt><dd class="figure">{escape(number)}{small}</dd>'
        f'<dd class="detail">{escape(detail)}</dd></div>'
    )


def figure(chart: Chart, emulated: bool = False) -> str:
    """A chart with its title, and the names of its curves and bands."""
    legend = "".join(
        f'<span class="s{index}">{escape(series.name)}</span>' for index, series in enumerate(chart.series)
    )
    bands = "".join(
        f'<span class="b{number}">{escape(band.name)}</span>' for number, band in enumerate(chart.bands)
    )
    return (
        f'<figure class="card"><figcaption><h3>{escape(chart.title)}{emulated_tag(emulated)}</h3>'
        + (f'<span class="legend">{legend}</span>' if len(chart.series) > 1 else "")
        + (f'<span class="bands">{bands}</span>' if bands else "")
        + f"</figcaption>{line_chart(chart)}</figure>"
    )


def emulated_tag(emulated: bool) -> str:
    return '<span class="tag">emulated</span>' if emulated else ""


def inline(picture: str) -> str:
    """An SVG file as part of a page."""
    return picture.replace(f' xmlns="{SVG_NAMESPACE}"', "")
