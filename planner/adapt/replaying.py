"""Repeats what a planner decided from what it was told, as `recording.py` wrote it down. Pure: entries go in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.adapt.live import Heard, LivePlanner
from planner.adapt.policy import MoveDecision
from planner.adapt.recording import Asked, Began, Ended, Entry, Given, Kept, Planned, PlannerAnswered, Took
from planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The planner's answers to some observations, recorded and replayed."""

    took: Took
    heard: Heard

    @property
    def same(self) -> bool:
        return self.took.heard == self.heard


@dataclass(frozen=True, kw_only=True)
class ReplayedDecision:
    """The planner's decision, recorded and replayed."""

    asked: Asked
    recorded: MoveDecision | None
    """None: the recording ends before."""
    decision: MoveDecision

    @property
    def same(self) -> bool:
        return self.recorded is None or self.recorded == self.decision


def replayed(entries: Iterable[Entry]) -> Iterator[Observed | ReplayedDecision]:
    """Feed a planner with what another one was told, in that order; yield what it answers.

    Raises:
        ValueError: the entries are in no order that a planner can follow.
    """
    planner: LivePlanner | None = None
    plans: dict[int, Plan] = {}
    waiting: dict[int, tuple[Asked, MoveDecision]] = {}
    for entry in entries:
        if isinstance(entry, Began):
            yield from _unanswered(waiting)
            planner, plans, waiting = LivePlanner(entry.start), {}, {}
            continue
        if planner is None:
            raise ValueError(f"{type(entry).__name__} comes before a planner began")
        match entry:
            case Planned():
                plans[entry.number] = entry.plan
            case Took():
                if missing := set(entry.plans) - plans.keys():
                    raise ValueError(f"plan {min(missing)} is named before it is there")
                heard = planner.observe(entry.batch, [plans[number] for number in entry.plans], entry.members)
                yield Observed(took=entry, heard=heard)
            case Kept():
                planner.keep(entry.ranks)
            case Given():
                planner.plan_with(entry.replanner)
            case Asked():
                waiting[entry.number] = entry, planner.decide(entry.question)
            case PlannerAnswered():
                if entry.number not in waiting:
                    raise ValueError(f"decision {entry.number} answers no question")
                asked, decision = waiting.pop(entry.number)
                yield ReplayedDecision(asked=asked, recorded=entry.decision, decision=decision)
            case Ended():
                pass
    yield from _unanswered(waiting)


def _unanswered(waiting: dict[int, tuple[Asked, MoveDecision]]) -> Iterator[ReplayedDecision]:
    for asked, decision in waiting.values():
        yield ReplayedDecision(asked=asked, recorded=None, decision=decision)
