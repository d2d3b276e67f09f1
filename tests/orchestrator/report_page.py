"""A parser for a report's HTML, for the tests of its sections, and what a timeline's data say."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """The page's elements with attributes, its text and its charts' data. Elements must close in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.charts: dict[str, dict[str, Any]] = {}
        """The charts by title."""
        self.timelines: list[dict[str, Any]] = []
        self.open: list[str] = []
        self.heading = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        element, attributes = self.elements[-1] if self.elements else ("", {})
        if self.open[-1:] == ["style"]:
            self.styles.append(data)
        elif self.open[-1:] != ["script"]:
            if self.open[-1:] == ["h3"]:
                self.heading = data
            self.text += data
        elif attributes.get("type") == "application/json":
            assert element == "script"
            figure = [each for name, each in self.elements if name == "figure"][-1]
            if "timeline-view" in figure["class"]:
                self.timelines.append(json.loads(data))
            else:
                self.charts[self.heading] = json.loads(data)
        else:
            self.scripts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def tokens(lane: dict[str, Any]) -> list[str]:
    """The actions of a timeline's lane."""
    stages = lane["stages"] if isinstance(lane["stages"], list) else [lane["stages"]] * len(lane["kinds"])
    indices = lane["indices"]
    if indices is None:
        seen: Counter[tuple[int, str]] = Counter()
        indices = []
        for each in zip(stages, lane["kinds"], strict=True):
            indices.append(seen[each])
            seen[each] += 1
    return [
        f"{stage}{kind}{index}" for stage, kind, index in zip(stages, lane["kinds"], indices, strict=True)
    ]


def times(timeline: dict[str, Any], lane: dict[str, Any]) -> list[tuple[float, float]]:
    """(start, end) of each action of a lane, in the timeline's unit."""
    spans: list[tuple[float, float]] = []
    now = 0
    for gap, length in zip(lane["times"][::2], lane["times"][1::2], strict=True):
        spans.append(((now + gap) * timeline["scale"], (now + gap + length) * timeline["scale"]))
        now += gap + length
    return spans
