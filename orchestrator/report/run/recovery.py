"""Failures and joins in `report.html`: live nodes, throughput, and what each change of nodes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.analysis.effective_time import Cost, EffectiveTime, effective_time, spread
from orchestrator.analysis.node_time import PARTS, parts
from orchestrator.events.rehearsed import Rehearsed
from orchestrator.history.job_view import JobView
from orchestrator.history.recovery_history import RecoveryHistory
from orchestrator.pictures.charts import Chart, Point, Series
from orchestrator.quantities import percent, rate, seconds, significant
from orchestrator.report.parts import Cell, Column, Explained, Table, Tile, tile
from orchestrator.report.rehearsal_text import USES
from planner.wording import counted

MOST_ROWS = 60


@dataclass(frozen=True, kw_only=True)
class RecoveryPart:
    """The cost of changes of nodes."""

    title: str
    how: str = ""
    emulated: bool = False
    tiles: tuple[Tile, ...]
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...]


def recovery(run: JobView) -> RecoveryPart | None:
    """The part; None for a job whose ranks stayed the same."""
    history = run.recovery
    found = effective_time(history, emulated=run.emulated)
    if found is None:
        if not history.regroupings and not history.stalls:
            return None
        return RecoveryPart(
            title="Recoveries",
            tiles=(*_recovery_tiles(history), *_stall_tiles(run)),
            tables=(*_changes(_regroupings(history)), *_stalls(run)),
        )
    rehearsed = history.rehearsed
    assert rehearsed is not None
    return RecoveryPart(
        title="Rehearsal",
        how=f"{rehearsed.trace}, {found.speedup:.3g} times as fast",
        emulated=found.emulated,
        tiles=(*_tiles(found), *_stall_tiles(run)),
        charts=_charts(history, rehearsed, run.emulated),
        tables=(_uses(found), *_copies(found), *_changes(_costs(found.costs)), *_stalls(run)),
    )


def _tiles(found: EffectiveTime) -> tuple[Tile, ...]:
    entries = [
        (
            "Effective training time ratio",
            f"{found.ratio:.3f}",
            f"{found.ratio_at_speed_1:.3f} at speed 1" + (", emulated" if found.emulated else ""),
        ),
        ("Nodes lost", f"{found.losses:,}", f"{found.joins:,} joined"),
        ("Committed steps lost", f"{found.steps_lost:,}", f"{found.rerun:,} in flight run again"),
        ("A failed node costs", f"{significant(found.lost_per_loss)} node-s", "mean"),
    ]
    if (total := found.recovery_s.get("total")) is not None:
        entries.append(
            ("Recovery", seconds(total.p50), f"p95 {seconds(total.p95)}, max {seconds(total.max)}")
        )
    if (commit := found.recovery_s.get("commit")) is not None:
        entries.append(
            (
                "Death to next commit",
                seconds(commit.p50),
                f"p95 {seconds(commit.p95)}, max {seconds(commit.max)}",
            )
        )
    return tuple(tile(*entry) for entry in entries)


def _recovery_tiles(history: RecoveryHistory) -> tuple[Tile, ...]:
    """Tiles of a job that is not a rehearsal."""
    events = [each.regrouped for each in history.regroupings if each.regrouped is not None]
    entries = [
        (
            "Changes of ranks",
            f"{len(events):,}",
            f"{counted(sum(len(event.lost) for event in events), 'rank')} failed or drained",
        ),
        (
            "Committed steps lost",
            f"{sum(event.steps_lost for event in events):,}",
            f"{sum(event.rerun for event in events):,} in flight run again",
        ),
    ]
    after_losses = [sum(parts(event)) for event in events if event.cause == "loss"]
    if after_losses:
        total = spread(after_losses)
        entries.append(
            ("Recovery", seconds(total.p50), f"p95 {seconds(total.p95)}, max {seconds(total.max)}")
        )
    return tuple(tile(*entry) for entry in entries)


def _stall_tiles(run: JobView) -> tuple[Tile, ...]:
    """Duration of the standstills; empty if there were none."""
    if not run.totals.stalls:
        return ()
    of = f"{counted(run.totals.stalls, 'standstill')}, all ranks together"
    return (tile("Stood still", seconds(run.totals.stalled_s), of),)


def _stalls(run: JobView) -> tuple[Table, ...]:
    """The standstills of ranks that went on; empty if there were none."""
    shown = run.recovery.stalls[-MOST_ROWS:]
    left = run.totals.stalls - len(shown)
    table = Table(
        label="Ranks that stood still and went on",
        columns=(
            Column("Went on", "number"),
            Column("Rank"),
            Column("Stood still", "number"),
            Column("What was seen", "text"),
        ),
        rows=tuple(
            (
                f"{seconds(stall.end_s - run.started_s)} after the start",
                str(stall.event.rank),
                seconds(stall.event.seconds),
                stall.event.reason or (f"it computed {stall.event.action}" if stall.event.action else "–"),
            )
            for stall in shown
        ),
        more=f"{counted(left, 'earlier one')} in the event log." if left > 0 else "",
    )
    return (table,) if shown else ()


def _charts(history: RecoveryHistory, rehearsed: Rehearsed, emulated: bool) -> tuple[Chart, ...]:
    """Nodes and throughput over the time of the rehearsal."""
    length_s = rehearsed.ended_s - rehearsed.began_s
    unit, unit_s = ("minute", 60.0) if length_s > 1200 else ("second", 1.0)
    failures = {
        round((life.down_s - rehearsed.began_s) / unit_s)
        for life in rehearsed.lives
        if life.down_s is not None and rehearsed.began_s <= life.down_s <= rehearsed.ended_s
    }
    return (
        Chart(
            title="Nodes",
            unit="nodes",
            series=(
                Series(name="live", points=_scaled(_live(rehearsed), unit_s), stepped=True),
                Series(name="training", points=_scaled(_training(history, rehearsed), unit_s), stepped=True),
            ),
            format=significant,
            from_zero=True,
            axis=unit,
            emulated=emulated,
        ),
        Chart(
            title="Throughput",
            unit="tokens or samples per second",
            series=(Series(name="throughput", points=_scaled(_throughput(history, rehearsed), unit_s)),),
            format=rate,
            from_zero=True,
            marks=tuple(sorted(failures)),
            mark_name=f"failure at {unit}",
            axis=unit,
            emulated=emulated,
        ),
    )


def _scaled(points: Sequence[Point], unit_s: float) -> tuple[Point, ...]:
    return tuple((time_s / unit_s, value) for time_s, value in points)


def _live(rehearsed: Rehearsed) -> list[Point]:
    """(seconds since the start, live nodes from then on)."""
    return _stairs(
        [(life.up_s, 1) for life in rehearsed.lives]
        + [(life.down_s, -1) for life in rehearsed.lives if life.down_s is not None],
        rehearsed,
    )


def _training(history: RecoveryHistory, rehearsed: Rehearsed) -> list[Point]:
    """Nodes that train committed steps, including steps that a checkpoint later undid; none while a job
    recovers."""
    changes: list[tuple[float, int]] = []
    for stretch in history.stretches():
        if stretch.generation >= 0:
            nodes = {history.homes.get(rank) for rank in history.generations[stretch.generation].members}
            changes += [(stretch.start_s, len(nodes)), (stretch.end_s, -len(nodes))]
    return _stairs(changes, rehearsed)


def _stairs(changes: list[tuple[float, int]], rehearsed: Rehearsed) -> list[Point]:
    length_s = rehearsed.ended_s - rehearsed.began_s
    level = sum(change for time_s, change in changes if time_s <= rehearsed.began_s)
    inside: dict[float, int] = {}
    for time_s, change in sorted(changes):
        if rehearsed.began_s < time_s <= rehearsed.ended_s:
            inside[time_s] = inside.get(time_s, 0) + change
    levels = {0.0: float(level)}
    for time_s, change in inside.items():
        level += change
        levels[time_s - rehearsed.began_s] = float(level)
    levels[length_s] = float(level)
    return list(levels.items())


def _throughput(history: RecoveryHistory, rehearsed: Rehearsed) -> list[Point]:
    """Throughput from commit to commit: the time of a recovery counts in the step after it."""
    return [
        (after.time_s - rehearsed.began_s, after.samples / (after.time_s - before.time_s))
        for before, after in pairwise(history.commits)
        if rehearsed.began_s <= after.time_s <= rehearsed.ended_s and after.time_s > before.time_s
    ]


def _uses(found: EffectiveTime) -> Table:
    return Table(
        label="Node-seconds",
        columns=(Column("Live node-seconds"), Column("Spent", "number"), Column("Share", "number")),
        rows=tuple(
            (USES[use], f"{spent:,.1f}", percent(spent / found.live))
            for use, spent in found.node_seconds.items()
            if spent > 0
        ),
    )


def _copies(found: EffectiveTime) -> tuple[Table, ...]:
    """Savings of layer copies on the trace; empty if unknown."""
    if not found.copies:
        return ()
    losses = counted(found.copies[0].losses, "loss", "losses")
    table = Table(
        label=f"Up-to-date copies of every layer: what the {losses} of the whole trace would cost with them",
        columns=(
            Column("Copies", "number"),
            Column("Losses of the last node that holds some layer", "number"),
            Column("Committed steps lost", "number"),
        ),
        rows=tuple(
            (str(saved.copies), f"{saved.last_holders:,}", f"{saved.steps_lost:,}") for saved in found.copies
        ),
    )
    return (table,)


def _costs(costs: tuple[Cost, ...]) -> list[tuple[Cell, ...]]:
    """The cost of each change of nodes."""
    return [
        (
            seconds(cost.at_s) if cost.at_s >= 0 else "–",
            cost.cause,
            Explained(_change(cost.lost, cost.joined), cost.reason),
            str(cost.members),
            *map(seconds, cost.parts_s),
            f"{cost.total_node_seconds:,.1f}",
            str(cost.steps_lost),
        )
        for cost in costs
    ]


def _regroupings(history: RecoveryHistory) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for each in history.regroupings:
        event = each.regrouped
        assert event is not None
        change = _change([f"rank {rank}" for rank in event.lost], [f"rank {rank}" for rank in event.joined])
        rows.append(
            (
                f"step {event.step:,}",
                event.cause,
                Explained(change, event.reason),
                str(len(each.members)),
                *map(seconds, parts(event)),
                "–",
                str(event.steps_lost),
            )
        )
    return rows


def _change(lost: Sequence[str], joined: Sequence[str]) -> str:
    return ", ".join([*(f"−{name}" for name in lost), *(f"+{name}" for name in joined)]) or "–"


def _changes(rows: Sequence[tuple[Cell, ...]]) -> tuple[Table, ...]:
    """The table of changes; empty if nothing changed."""
    if not rows:
        return ()
    left = len(rows) - MOST_ROWS
    table = Table(
        label="Changes of nodes",
        columns=(
            Column("At", "number"),
            Column("Cause"),
            Column("Change", "text"),
            Column("Ranks", "number"),
            *(Column(part.capitalize(), "number") for part in PARTS),
            Column("Node-seconds", "number"),
            Column("Steps lost", "number"),
        ),
        rows=tuple(rows[:MOST_ROWS]),
        more=f"{counted(left, 'more change')} in the event log." if left > 0 else "",
    )
    return (table,)
