"""Losses and joins in `report.html`: who was live, how fast the job was, what each change of nodes cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from orchestrator.analysis.effective_time import Cost, EffectiveTime, effective_time, spread
from orchestrator.analysis.node_time import PARTS, parts
from orchestrator.events.rehearsed import Rehearsed
from orchestrator.history.job_view import JobView
from orchestrator.history.recovery_history import RecoveryHistory
from orchestrator.pictures.charts import Chart, Point, Series
from orchestrator.quantities import counted, percent, rate, seconds, significant
from orchestrator.report.parts import emulated_tag, figure, tile
from orchestrator.report.rehearsal_text import USES

MOST_ROWS = 60


def recovery(run: JobView) -> str:
    """The whole part; empty for a job whose ranks stayed the same."""
    history = run.recovery
    found = effective_time(history, emulated=run.emulated)
    if found is None:
        if not history.regroupings:
            return ""
        return f"<section><h2>Recoveries</h2>{_recovery_tiles(history)}{_regroupings(history)}</section>"
    rehearsed = history.rehearsed
    assert rehearsed is not None
    how = f"<small>{escape(rehearsed.trace)}, {found.speedup:.3g} times as fast</small>"
    return (
        f"<section><h2>Rehearsal{emulated_tag(found.emulated)}{how}</h2>"
        f"{_tiles(found)}{_charts(history, rehearsed, run.emulated)}{_uses(found)}{_costs(found.costs)}</section>"
    )


def _tiles(found: EffectiveTime) -> str:
    entries = [
        (
            "Effective training time ratio",
            f"{found.ratio:.3f}",
            f"{found.ratio_at_speed_1:.3f} at speed 1" + (", emulated" if found.emulated else ""),
        ),
        ("Nodes lost", f"{found.losses:,}", f"{found.joins:,} joined"),
        ("Committed steps lost", f"{found.steps_lost:,}", f"{found.rerun:,} in flight run again"),
        ("A loss costs", f"{significant(found.lost_per_loss)} node-s", "mean"),
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
    return f'<dl class="tiles">{"".join(tile(*entry) for entry in entries)}</dl>'


def _recovery_tiles(history: RecoveryHistory) -> str:
    """Of a job that no trace was replayed against."""
    events = [each.regrouped for each in history.regroupings if each.regrouped is not None]
    entries = [
        (
            "Changes of ranks",
            f"{len(events):,}",
            f"{sum(len(event.lost) for event in events):,} ranks lost or let go",
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
    return f'<dl class="tiles">{"".join(tile(*entry) for entry in entries)}</dl>'


def _charts(history: RecoveryHistory, rehearsed: Rehearsed, emulated: bool) -> str:
    """Nodes and throughput over the time of the rehearsal."""
    length_s = rehearsed.ended_s - rehearsed.began_s
    unit, unit_s = ("minute", 60.0) if length_s > 1200 else ("second", 1.0)
    losses = tuple(
        round((life.down_s - rehearsed.began_s) / unit_s)
        for life in rehearsed.lives
        if life.down_s is not None and rehearsed.began_s <= life.down_s <= rehearsed.ended_s
    )
    charts = [
        Chart(
            title="Nodes",
            unit="nodes",
            series=(
                Series(name="live", points=_scaled(_live(rehearsed), unit_s)),
                Series(name="training", points=_scaled(_training(history, rehearsed), unit_s)),
            ),
            format=significant,
            from_zero=True,
            axis=unit,
        ),
        Chart(
            title="Throughput",
            unit="tokens or samples per second",
            series=(Series(name="throughput", points=_scaled(_throughput(history, rehearsed), unit_s)),),
            format=rate,
            from_zero=True,
            marks=losses,
            mark_name=f"loss at {unit}",
            axis=unit,
        ),
    ]
    return f'<div class="charts after">{"".join(figure(chart, emulated) for chart in charts)}</div>'


def _scaled(points: Sequence[Point], unit_s: float) -> tuple[Point, ...]:
    return tuple((time_s / unit_s, value) for time_s, value in points)


def _live(rehearsed: Rehearsed) -> list[Point]:
    """(seconds since the beginning, live nodes), with a corner at each change."""
    return _stairs(
        [(life.up_s, 1) for life in rehearsed.lives]
        + [(life.down_s, -1) for life in rehearsed.lives if life.down_s is not None],
        rehearsed,
    )


def _training(history: RecoveryHistory, rehearsed: Rehearsed) -> list[Point]:
    """Nodes that are in committed steps, those undone later among them: none while a job recovers."""
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
    points: list[Point] = [(0.0, float(level))]
    for time_s, change in inside.items():
        points.append((time_s - rehearsed.began_s, float(level)))
        level += change
        points.append((time_s - rehearsed.began_s, float(level)))
    points.append((length_s, float(level)))
    return points


def _throughput(history: RecoveryHistory, rehearsed: Rehearsed) -> list[Point]:
    """From commit to commit: what a recovery takes is in the step after it."""
    return [
        (after.time_s - rehearsed.began_s, after.samples / (after.time_s - before.time_s))
        for before, after in pairwise(history.commits)
        if rehearsed.began_s <= after.time_s <= rehearsed.ended_s and after.time_s > before.time_s
    ]


def _uses(found: EffectiveTime) -> str:
    rows = "".join(
        f'<tr><td>{escape(USES[use])}</td><td class="number">{spent:,.1f}</td>'
        f'<td class="number">{percent(spent / found.live)}</td></tr>'
        for use, spent in found.node_seconds.items()
        if spent > 0
    )
    return (
        '<div class="card scroll after" tabindex="0" role="region" aria-label="Node-seconds"><table><thead><tr>'
        '<th scope="col">Live node-seconds</th><th class="number" scope="col">Spent</th>'
        f'<th class="number" scope="col">Share</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _costs(costs: tuple[Cost, ...]) -> str:
    """What each change of nodes cost."""
    rows = [
        (
            seconds(cost.at_s) if cost.at_s >= 0 else "–",
            cost.cause,
            _change(cost.lost, cost.joined),
            cost.members,
            cost.parts_s,
            f"{cost.total_node_seconds:,.1f}",
            cost.steps_lost,
            cost.reason,
        )
        for cost in costs
    ]
    return _table(rows)


def _regroupings(history: RecoveryHistory) -> str:
    rows = []
    for each in history.regroupings:
        event = each.regrouped
        assert event is not None
        change = _change([f"rank {rank}" for rank in event.lost], [f"rank {rank}" for rank in event.joined])
        rows.append(
            (
                f"step {event.step:,}",
                event.cause,
                change,
                len(each.members),
                parts(event),
                "–",
                event.steps_lost,
                event.reason,
            )
        )
    return _table(rows)


def _change(lost: Sequence[str], joined: Sequence[str]) -> str:
    return ", ".join([*(f"−{name}" for name in lost), *(f"+{name}" for name in joined)]) or "–"


def _table(rows: Sequence[tuple[str, str, str, int, tuple[float, ...], str, int, str]]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th class="number" scope="col">{part.capitalize()}</th>' for part in PARTS)
    body = "".join(
        f'<tr><td class="number">{escape(when)}</td><td>{escape(cause)}</td>'
        f'<td class="text"><b>{escape(change)}</b><br>{escape(reason)}</td>'
        f'<td class="number">{members}</td>'
        + "".join(f'<td class="number">{seconds(part_s)}</td>' for part_s in parts_s)
        + f'<td class="number">{cost}</td><td class="number">{steps_lost}</td></tr>'
        for when, cause, change, members, parts_s, cost, steps_lost, reason in rows[:MOST_ROWS]
    )
    left = len(rows) - MOST_ROWS
    more = f'<p class="caption">{counted(left, "more change")} in the event log.</p>' if left > 0 else ""
    return (
        '<div class="card scroll after" tabindex="0" role="region" aria-label="Changes of nodes"><table><thead><tr>'
        '<th class="number" scope="col">At</th><th scope="col">Cause</th><th scope="col">Change</th>'
        f'<th class="number" scope="col">Ranks</th>{heads}<th class="number" scope="col">Node-seconds</th>'
        '<th class="number" scope="col">Steps lost</th>'
        f"</tr></thead><tbody>{body}</tbody></table></div>{more}"
    )
