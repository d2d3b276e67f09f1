"""Layers that moved between ranks, in `report.html`: which, from where to where, how, and at what cost."""

from __future__ import annotations

from orchestrator.events.types import Migrated
from orchestrator.history.job_view import JobView
from orchestrator.quantities import seconds, size
from orchestrator.report.parts import Cell, Column, Table
from planner.wording import counted, shares_text

MOST_ROWS = 60


def moves(run: JobView) -> Table | None:
    """A row per move; None for a job whose layers never moved."""
    if not run.moves:
        return None
    left = len(run.moves) - MOST_ROWS
    return Table(
        label="Layers that moved",
        columns=(
            Column("After step", "number"),
            Column("Layers", "text"),
            Column("Mode"),
            Column("Sent", "number"),
            Column("Took", "number"),
            Column("Steps meanwhile", "number"),
            Column("Stall", "number"),
        ),
        rows=tuple(_row(move) for move in run.moves[:MOST_ROWS]),
        more=f"{counted(left, 'more move')} in the event log." if left > 0 else "",
    )


def _row(move: Migrated) -> tuple[Cell, ...]:
    return (
        f"{move.step:,}",
        ways_text(move),
        move.mode,
        "–" if move.bytes is None else size(move.bytes),
        seconds(move.seconds),
        f"{move.steps:,}",
        seconds(move.stall_s),
    )


def ways_text(move: Migrated) -> str:
    """The layers that moved, by their ways: `4, 5: place 1 → 0`; and the shares of pipelines, if they changed."""
    ways: dict[tuple[int, int], list[int]] = {}
    for layer, source, target in zip(move.layers, move.source, move.target, strict=True):
        ways.setdefault((source, target), []).append(layer)
    moved = [
        f"{', '.join(map(str, layers))}: place {source} → {target}"
        for (source, target), layers in ways.items()
    ]
    if move.shares or not moved:
        moved.append(shares_text(move.shares))
    return "; ".join(moved)
