"""The parts of a page's sections: figures, notes and tables, as facts. The templates determine their look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Tile:
    """A figure with its name and a detail."""

    name: str
    number: str
    unit: str
    detail: str


def tile(name: str, figure: str, detail: str) -> Tile:
    """The tile of a figure such as `183 ms`."""
    number, _, unit = figure.partition(" ")
    return Tile(name, number, unit, detail)


@dataclass(frozen=True)
class ReportNote:
    """A line that readers must not miss."""

    tone: Tone
    name: str
    """`Warning`."""
    text: str


@dataclass(frozen=True)
class Pill:
    """A cell that shows how something went."""

    text: str
    tone: Tone


@dataclass(frozen=True)
class Explained:
    """A cell with the reason below."""

    text: str
    reason: str


Cell = str | Pill | Explained


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    kind: Literal["", "number", "text"] = ""
    """`number`: right-aligned; `text`: long, may break anywhere."""


@dataclass(frozen=True)
class Table:
    """Rows under columns."""

    label: str
    """For readers who do not see the page."""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    more: str = ""
    """A line below, on rows that are left out or on what the cells mean."""
