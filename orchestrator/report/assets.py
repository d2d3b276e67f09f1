"""Renders a template with what a page embeds: styles, scripts, and the policy that allows only these."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup

from orchestrator.pictures.chart_library import chart_script, chart_style
from orchestrator.pictures.templating import environment, static

_REPORT, _PICTURES = "orchestrator.report", "orchestrator.pictures"
_STYLES = (
    (_REPORT, "page.css"),
    (_PICTURES, "charts.css"),
    (_PICTURES, "heat_map.css"),
    (_PICTURES, "timeline_view.css"),
)
TIMELINE_SCRIPTS = ("timeline_canvas.js", "timeline_view.js")
"""Static files of `orchestrator.pictures`, in the order in which a page with timelines needs them."""


@dataclass(frozen=True)
class Assets:
    """The text of the page's only style and script elements, and its Content-Security-Policy."""

    style: Markup
    script: Markup
    policy: str


@cache
def assets(charts: bool, timelines: bool) -> Assets:
    """The assets of a page with or without charts and timelines."""
    style = "\n".join([chart_style() if charts else "", *(static(*name) for name in _STYLES)])
    scripts = [chart_script(), static(_PICTURES, "charts.js")] if charts else []
    scripts += [static(_PICTURES, name) for name in TIMELINE_SCRIPTS] if timelines else []
    script = "\n".join(scripts)
    sources = f"style-src {_source(style)};" + (f" script-src {_source(script)};" if script else "")
    policy = f"default-src 'none'; {sources} base-uri 'none'; form-action 'none'"
    return Assets(Markup(style), Markup(script), policy)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_page(
    template: str, facts: Mapping[str, object], *, charts: bool = False, timelines: bool = False
) -> str:
    """The page that `template` renders from `facts`, which it refers to by name."""
    page = environment(_REPORT, _PICTURES).get_template(template)
    return page.render(facts, assets=assets(charts, timelines))
