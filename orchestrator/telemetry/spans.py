"""Recoveries and moves as spans with real times. Pure: events in, spans out; `otel.py` exports them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from orchestrator.events.types import Formed, Migrated, Paused, Record, Regrouped
from orchestrator.history.totals import part_seconds
from workers.protocol.reports import SwitchReport

BEFORE_A_PAUSE = ("detect", "settle")
"""Parts of a recovery that come before the job waits for capacity."""

Value = str | int | float


@dataclass(frozen=True, kw_only=True)
class TimeSpan:
    """A stretch of time; seconds since the Unix epoch."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    children: tuple[TimeSpan, ...] = ()


class Spans:
    """Makes spans of a job's events."""

    def __init__(self) -> None:
        self._paused_s: float | None = None
        self._switches: list[SwitchReport] = []

    def fold(self, record: Record) -> TimeSpan | None:
        """Return the span that ends with `record`, if one does."""
        match record.event:
            case Paused():
                self._paused_s = record.time_s
            case Regrouped() as regrouped:
                paused_s, self._paused_s = self._paused_s, None
                return recovery(regrouped, record.time_s, paused_s)
            case SwitchReport() as switch:
                self._switches.append(switch)
            case Migrated() as moved:
                switches, self._switches = self._switches, []
                return move(moved, record.time_s, switches)
            case Formed():
                self._switches.clear()
            case _:
                pass
        return None


def recovery(regrouped: Regrouped, end_s: float, paused_s: float | None = None) -> TimeSpan:
    """The span of a recovery that ended at `end_s`, with one child for each of its parts.

    Args:
        paused_s: when the job began to wait for capacity, if it did: detecting and settling ended then.
    """
    seconds = part_seconds(regrouped)
    if paused_s is None:
        children = _in_a_row(seconds, end_s)
    else:
        late = _in_a_row({part: seconds[part] for part in seconds if part not in BEFORE_A_PAUSE}, end_s)
        paused_s = min(paused_s, late[0].start_s)
        early = _in_a_row({part: seconds[part] for part in BEFORE_A_PAUSE}, paused_s)
        children = [*early, TimeSpan(name="wait", start_s=paused_s, end_s=late[0].start_s), *late]
    return TimeSpan(
        name="recovery",
        start_s=children[0].start_s,
        end_s=end_s,
        attributes={
            "freshet.cause": regrouped.cause,
            "freshet.reason": regrouped.reason,
            "freshet.generation": regrouped.generation,
            "freshet.step": regrouped.step,
            "freshet.ranks_lost": len(regrouped.lost),
            "freshet.ranks_joined": len(regrouped.joined),
            "freshet.steps_rerun": regrouped.rerun + regrouped.steps_lost,
        },
        children=tuple(children),
    )


def _in_a_row(seconds: dict[str, float], end_s: float) -> list[TimeSpan]:
    """Spans of these names and lengths, one after the other; the last ends at `end_s`."""
    times_s = [*accumulate(seconds.values(), initial=end_s - sum(seconds.values())), end_s]
    return [
        TimeSpan(name=part, start_s=start_s, end_s=stop_s)
        for part, (start_s, stop_s) in zip(seconds, pairwise(times_s), strict=False)
    ]


def move(moved: Migrated, end_s: float, switches: list[SwitchReport]) -> TimeSpan:
    """The span of a move that was complete at `end_s`, with one child for each rank's switch."""
    start_s = end_s - moved.seconds
    ours = [switch for switch in switches if switch.switched_s >= start_s]
    return TimeSpan(
        name="move",
        start_s=start_s,
        end_s=end_s,
        attributes={
            "freshet.layers": ",".join(map(str, moved.layers)),
            "freshet.from": ",".join(map(str, moved.source)),
            "freshet.to": ",".join(map(str, moved.target)),
            "freshet.mode": moved.mode,
            "freshet.bytes": moved.bytes or 0,
            "freshet.steps": moved.steps,
            "freshet.step": moved.step,
            "freshet.stall_s": moved.stall_s,
        },
        children=tuple(
            TimeSpan(
                name="switch",
                start_s=switch.switched_s - switch.stall_s,
                end_s=switch.switched_s,
                attributes={
                    "freshet.rank": switch.rank,
                    "freshet.taken": len(switch.taken),
                    "freshet.given": len(switch.given),
                },
            )
            for switch in ours
        ),
    )
