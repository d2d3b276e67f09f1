"""A timeline to zoom into, as data for a page: `static/timeline_view.js` draws it on a canvas.

It has the steps of `timeline_svg.py`, which makes files that stand alone. Times are ticks, at most a thousandth of a
mean action. An action is written as the gap before it and its length: 5,000 actions take some 40 kB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.pictures.memory_use import USES, Used, bytes_text, present, used
from orchestrator.pictures.spans import (
    COLOURS,
    NAMES,
    DrawnSpan,
    by_action,
    end_of,
    kinds_of,
    parsed,
    seconds_text,
    share_of,
    unit_of,
)
from orchestrator.pictures.timeline_svg import Step
from planner.ir import Action, ActionKind
from planner.wording import counted

TICKS_PER_ACTION = 1_000
FEWEST_TICKS = 100_000
"""In the longest step: 100 for a pixel."""
_FULL = 1000
"""Height of a memory strip, in its own units."""


@dataclass(frozen=True, eq=False)
class TimelineView:
    """Steps below each other on one axis."""

    title: str
    steps: Sequence[Step]

    @cached_property
    def end_s(self) -> float:
        """The end of the axis."""
        return max(end_of(step.timeline, step.end_s) for step in self.steps)

    @cached_property
    def ticks(self) -> int:
        """Ticks in the longest step."""
        most = max((len(lane) for step in self.steps for lane in step.timeline), default=0)
        return max(TICKS_PER_ACTION * most, FEWEST_TICKS)

    @cached_property
    def actions(self) -> list[list[list[Action]]]:
        """Step -> rank -> actions."""
        return [parsed(step.timeline) for step in self.steps]

    @property
    def kinds(self) -> list[tuple[ActionKind, str, str]]:
        """(kind, name, colour) of the kinds that occur."""
        found = kinds_of([rank for step in self.actions for rank in step])
        return [(kind, NAMES[kind], COLOURS[kind]) for kind in found]

    @cached_property
    def uses(self) -> list[int]:
        """Numbers of the uses of memory that occur."""
        return present([used(rank) for step in self.steps for rank in step.memory])

    @property
    def memory_keys(self) -> list[tuple[str, str]]:
        """(name, colour) of the uses of memory that occur."""
        return [(USES[number].name, USES[number].colour) for number in self.uses]

    @property
    def frozen(self) -> bool:
        return any(step.frozen for step in self.steps)

    @property
    def critical(self) -> bool:
        return any(step.critical for step in self.steps)

    @property
    def words(self) -> str:
        """The picture in words, for readers who cannot see it."""
        sentences = [self.title] if self.title else []
        for step in self.steps:
            lanes, end_s = step.timeline, end_of(step.timeline, step.end_s)
            busy = ", ".join(
                f"rank {rank} {100 * sum(s.end_s - s.start_s for s in spans) / end_s if end_s else 0:.0f} %"
                for rank, spans in enumerate(lanes)
            )
            count = sum(map(len, lanes))
            sentences.append(
                f"{step.name or 'the step'}: {counted(count, 'action')} on {counted(len(lanes), 'rank')} in"
                f" {seconds_text(end_s)}; computing {busy}"
            )
        return ". ".join(sentences) + "."

    @property
    def data(self) -> dict[str, object]:
        """The data that `static/timeline_view.js` draws, as JSON values."""
        unit, factor = unit_of(self.end_s)
        most = max(
            (sum(sizes) for step in self.steps for rank in step.memory for _, sizes in used(rank)), default=0
        )
        return {
            "unit": unit,
            "scale": self.end_s * factor / self.ticks,
            "end": self.ticks,
            "kinds": {kind: {"name": name, "colour": colour} for kind, name, colour in self.kinds},
            "uses": [{"name": name, "colour": colour} for name, colour in self.memory_keys],
            "groups": [
                self._group(step, actions, most)
                for step, actions in zip(self.steps, self.actions, strict=True)
            ],
        }

    def _group(self, step: Step, actions: Sequence[Sequence[Action]], most: int) -> dict[str, object]:
        end_s = end_of(step.timeline, step.end_s)
        shares = by_action(step.frozen)
        critical: list[list[int]] = [[] for _ in step.timeline]
        for rank, number in step.critical:
            critical[rank].append(number)
        lanes = []
        for rank, spans in enumerate(step.timeline):
            frozen = {
                str(number): round(share, 3)
                for number, action in enumerate(actions[rank])
                if (share := share_of(shares, action))
            }
            stages = [action.stage for action in actions[rank]]
            lane: dict[str, object] = {
                "name": f"rank {rank}",
                "kinds": "".join(action.kind for action in actions[rank]),
                "stages": stages[0] if len(set(stages)) == 1 else stages,
                "indices": _indices(actions[rank]),
                "times": self._times(spans),
                "critical": sorted(critical[rank]),
                "frozen": frozen,
            }
            if step.memory and most:
                lane["memory"] = self._memory(used(step.memory[rank]), most)
            lanes.append(lane)
        return {
            "name": step.name,
            "end": self._tick(end_s),
            "length": seconds_text(end_s),
            "lanes": lanes,
        }

    def _times(self, spans: Sequence[DrawnSpan]) -> list[int]:
        times: list[int] = []
        now = 0
        for span in spans:
            start, end = self._tick(span.start_s), self._tick(span.end_s)
            times += (start - now, end - start)
            now = end
        return times

    def _memory(self, levels: Sequence[Used], most: int) -> dict[str, object]:
        return {
            "peak": bytes_text(max(sum(sizes) for _, sizes in levels)),
            "levels": [
                [self._tick(time_s), *(round(sizes[number] / most * _FULL, 1) for number in self.uses)]
                for time_s, sizes in levels
            ],
        }

    def _tick(self, seconds: float) -> int:
        return round(seconds / self.end_s * self.ticks) if self.end_s else 0


def _indices(actions: Sequence[Action]) -> list[int] | None:
    """The microbatches of `actions`; None if those of each kind and stage count up from 0, as in most schedules."""
    seen: Counter[tuple[ActionKind, int]] = Counter()
    expected = []
    for action in actions:
        expected.append(seen[action.kind, action.stage])
        seen[action.kind, action.stage] += 1
    indices = [action.index for action in actions]
    return indices if indices != expected else None
