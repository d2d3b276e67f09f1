"""A timeline as a picture: boxes, lanes, legends and ticks at their pixels; a template makes an SVG of it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.pictures.memory_strip import Strip
from orchestrator.pictures.templating import environment, static

_PACKAGE = "orchestrator.pictures"
LEFT, LANE = 60, 24
"""Where lanes begin, and their height."""


@dataclass(frozen=True)
class Box:
    """One action."""

    x: float
    width: float
    colour: str
    text: str
    """What it is and when it ran."""
    token: str
    """Empty where it does not fit."""
    middle: float
    pale: float
    """Height of the frozen share."""


@dataclass(frozen=True)
class Lane:
    """One rank."""

    rank: int
    y: int
    boxes: list[Box]
    strip: Strip | None


@dataclass(frozen=True)
class Group:
    """Lanes that belong together; a step without a name has no heading."""

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
    """Empty: a bubble's."""
    pale: bool = False


@dataclass(frozen=True)
class Tick:
    """A time on the axis."""

    x: float
    text: str


@dataclass(frozen=True)
class Picture:
    """All that is drawn, in pixels."""

    title: str
    width: int
    height: int
    top: int
    bottom: int
    unit: str
    legend: list[Key]
    memory_legend: list[Key]
    ticks: list[Tick]
    groups: list[Group]
    left: int = LEFT
    lane: int = LANE

    def svg(self, inline: bool = False) -> str:
        """The picture as text; `inline`: as part of a page, which has the styles."""
        style = None if inline else static(_PACKAGE, "timeline.css")
        return environment(_PACKAGE).get_template("timeline.svg.j2").render(picture=self, style=style)
