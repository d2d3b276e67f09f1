"""Renders the dashboard's pages and serves the files that they load."""

from __future__ import annotations

import hashlib
from functools import cache

from fastapi import Response

from orchestrator.pictures.templating import environment, static

PAGES, REPORT, PICTURES = "dashboard.pages", "orchestrator.report", "orchestrator.pictures"
KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def page(template: str, /, **facts: object) -> Response:
    """The page that `template` renders from `facts`."""
    text = environment(PAGES, REPORT, PICTURES).get_template(template).render(facts, asset=asset)
    return Response(text, media_type="text/html; charset=utf-8")


@cache
def bundle(name: str) -> str:
    """The text of a file that pages load."""
    return "\n".join(static(package, file) for package, file in BUNDLES[name])


@cache
def asset(name: str) -> str:
    """The path of a file that pages load, with its hash: browsers keep it until it changes."""
    return f"/static/{name}?{hashlib.sha256(bundle(name).encode()).hexdigest()[:12]}"


BUNDLES = {
    "page.css": (
        (REPORT, "page.css"),
        (PICTURES, "charts.css"),
        (PICTURES, "heat_map.css"),
        (PICTURES, "timeline.css"),
        (PAGES, "dashboard.css"),
    ),
    "live.js": ((PAGES, "live.js"),),
}
"""File -> the parts that it is made of."""
