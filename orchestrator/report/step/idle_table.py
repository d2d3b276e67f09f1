"""Idle time by cause as a table, and the critical path in words."""

from __future__ import annotations

from orchestrator.analysis.critical_path import NANOSECONDS
from orchestrator.analysis.idle_causes import IdleCauses
from orchestrator.quantities import percent, seconds
from orchestrator.report.parts import Cell, Column, Table
from planner.wording import counted

CAUSES = (
    "Dependency: the pipeline fills and drains. Imbalance: other stages take longer. Communication: messages in"
    " flight. Straggler: a rank slower than expected."
)


def idle_table(found: IdleCauses, which: str, expected_from: str = "") -> Table:
    """A row per rank with its idle time in the step's window, and how it divides.

    Args:
        which: the step in a word, such as `measured`.
        expected_from: what expected times come from, in words; empty: not told.
    """
    names = ("Rank", "Computing", "Idle", "Dependency", "Imbalance", "Communication", "Straggler")
    rows: list[tuple[Cell, ...]] = []
    for number, rank in enumerate(found.ranks):
        idle = f"{_time(rank.idle_ns)}, {percent(rank.idle_ns / found.window_ns)}" if rank.idle_ns else "–"
        causes = (rank.dependency_ns, rank.imbalance_ns, rank.communication_ns, rank.straggler_ns)
        rows.append((str(number), _time(rank.busy_ns), idle, *map(_time, causes)))
    source = f" Expected times: {expected_from}." if expected_from else ""
    return Table(
        label=f"Idle time by cause, {which}",
        columns=tuple(Column(name, "number") for name in names),
        rows=tuple(rows),
        more=f"{CAUSES}{source} {critical_text(found)}",
    )


def critical_text(found: IdleCauses) -> str:
    """Breakdown of the window by its critical path, in a sentence."""
    path, window_ns = found.critical, found.window_ns
    actions, ranks = len(path.spans), len({lane for lane, _ in path.spans})
    parts = [f"computing {seconds(path.computing_ns / NANOSECONDS)}"]
    parts += [f"messages {seconds(path.message_ns / NANOSECONDS)}"] if path.message_ns else []
    parts += [f"delays {seconds(path.delay_ns / NANOSECONDS)}"] if path.delay_ns else []
    return (
        f"The critical path explains the window of {seconds(window_ns / NANOSECONDS)}:"
        f" {counted(actions, 'action')} on {counted(ranks, 'rank')}, {', '.join(parts)}."
    )


def _time(time_ns: int) -> str:
    return seconds(time_ns / NANOSECONDS) if time_ns else "–"
