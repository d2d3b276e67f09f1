"""Renders the dashboard's pages and serves the files that they load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial

from fastapi import Response
from jinja2 import Environment
from markupsafe import Markup

from orchestrator.events.types import command_words
from orchestrator.pictures.chart_library import chart_script, chart_style
from orchestrator.pictures.templating import environment, static
from orchestrator.quantities import operations, percent, rate, seconds, significant, size
from orchestrator.report.assets import TIMELINE_SCRIPTS

PAGES, REPORT, PICTURES = "dashboard.pages", "orchestrator.report", "orchestrator.pictures"
KINDS = {"css": "text/css", "js": "text/javascript"}


def page(template: str, /, **facts: object) -> Response:
    """The page that `template` renders from `facts`."""
    return html(rendered(template, **facts))


def html(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with HTML."""
    return Response(text, status, headers, media_type="text/html; charset=utf-8")


def rendered(template: str, /, **facts: object) -> Markup:
    """Render `template` with `facts`."""
    return Markup(_environment().get_template(template).render(facts, asset=asset))


@cache
def _environment() -> Environment:
    found = environment(PAGES, REPORT, PICTURES)
    found.filters |= {
        "seconds": seconds,
        "rate": rate,
        "operations": operations,
        "percent": percent,
        "significant": significant,
        "size": size,
        "runs": runs_text,
        "clock": clock,
        "moment": moment,
        "minute": minute,
        "command": command_words,
    }
    return found


def clock(time_s: float) -> str:
    """The time of day of seconds since the Unix epoch."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S UTC")


def moment(time_s: float) -> str:
    """The day and time of seconds since the Unix epoch."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def minute(time_s: float) -> str:
    """The day and time of seconds since the Unix epoch, to the minute."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M")


def runs_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@cache
def bundle(name: str) -> str:
    """The text of a file that pages load."""
    return "\n".join(part() for part in BUNDLES[name])


@cache
def asset(name: str) -> str:
    """The path of a file that pages load, with its hash: browsers keep it until it changes."""
    return f"/static/{name}?{hashlib.sha256(bundle(name).encode()).hexdigest()[:12]}"


BUNDLES: Mapping[str, Sequence[Callable[[], str]]] = {
    "page.css": (
        partial(static, REPORT, "page.css"),
        partial(static, PICTURES, "charts.css"),
        partial(static, PICTURES, "heat_map.css"),
        partial(static, PICTURES, "timeline_view.css"),
        partial(static, PAGES, "dashboard.css"),
    ),
    "chart_library.css": (chart_style,),
    "chart_library.js": (chart_script,),
    "charts.js": (partial(static, PICTURES, "charts.js"),),
    "timelines.js": tuple(partial(static, PICTURES, name) for name in TIMELINE_SCRIPTS),
    "live.js": (partial(static, PAGES, "stream.js"), partial(static, PAGES, "live.js")),
}
"""File -> the parts that it is made of."""
