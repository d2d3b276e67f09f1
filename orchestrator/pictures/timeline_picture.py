"""A timeline as a picture: boxes, lanes, legends and ticks in pixels; a template renders it as SVG."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.pictures.memory_strip import Strip
from orchestrator.pictures.templating import environment, static

_PACKAGE = "orchestrator.pictures"
LEFT, LANE = 60, 24
"""The left edge of lanes and their height, in pixels."""


@dataclass(frozen=True)
class Box:
    """One action."""

    x: float
    width: float
    colour: str
    text: str
    """The action and when it ran."""
    token: str
    """The action's token; empty if it does not fit."""
    middle: float
    pale: float
    """Height of the frozen share."""
    critical: bool
    """Whether it is underlined."""


@dataclass(frozen=True)
class Lane:
    """One rank."""

    rank: int
    y: int
    boxes: list[Box]
    strip: Strip | None


@dataclass(frozen=True)
class LaneGroup:
    """Lanes that belong together. A step without a name has no heading."""

    heading: str
    top: int
    bottom: int
    end: float
    lanes: list[Lane]


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    x: float
    text: str
    colour: str = ""
    """CSS colour; empty: that of a bubble."""
    pale: bool = False
    underline: bool = False


@dataclass(frozen=True)
class Tick:
    """A time on the axis."""

    x: float
    text: str


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn, in pixels."""

    title: str
    width: int
    height: int
    top: int
    bottom: int
    unit: str
    legend: list[Key]
    memory_legend: list[Key]
    ticks: list[Tick]
    groups: list[LaneGroup]
    left: int = LEFT
    lane: int = LANE

    def svg(self) -> str:
        """The picture as the text of an SVG file that stands alone."""
        style = static(_PACKAGE, "timeline.css")
        return environment(_PACKAGE).get_template("timeline.svg.j2").render(picture=self, style=style)
