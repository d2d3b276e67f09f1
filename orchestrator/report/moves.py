"""Layers that changed ranks, in `report.html`: which, from where to where, how, and what that took."""

from __future__ import annotations

from html import escape

from orchestrator.events.types import Migrated
from orchestrator.history.job_view import JobView
from orchestrator.quantities import counted, seconds, size

MOST_ROWS = 60


def moves(run: JobView) -> str:
    """The whole part; empty for a job whose layers stayed where they were."""
    if not run.moves:
        return ""
    body = "".join(_row(move) for move in run.moves[:MOST_ROWS])
    left = len(run.moves) - MOST_ROWS
    more = f'<p class="caption">{counted(left, "more move")} in the event log.</p>' if left > 0 else ""
    heads = "".join(
        f'<th class="number" scope="col">{name}</th>'
        for name in ("Brought", "Took", "Steps meanwhile", "Stall")
    )
    return (
        '<section><h2>Layers that moved</h2><div class="card scroll" tabindex="0" role="region"'
        ' aria-label="Layers that moved"><table><thead><tr><th class="number" scope="col">After step</th>'
        f'<th scope="col">Layers</th><th scope="col">Mode</th>{heads}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{more}</section>"
    )


def _row(move: Migrated) -> str:
    ways: dict[tuple[int, int], list[int]] = {}
    for layer, source, target in zip(move.layers, move.source, move.target, strict=True):
        ways.setdefault((source, target), []).append(layer)
    text = "; ".join(
        f"{', '.join(map(str, layers))}: place {source} → {target}"
        for (source, target), layers in ways.items()
    )
    numbers = (
        "–" if move.bytes is None else size(move.bytes),
        seconds(move.seconds),
        f"{move.steps:,}",
        seconds(move.stall_s),
    )
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return (
        f'<tr><td class="number">{move.step:,}</td><td class="text">{escape(text)}</td>'
        f"<td>{escape(move.mode)}</td>{cells}</tr>"
    )
