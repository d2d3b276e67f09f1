"""What a controller learned of its ranks' memory, and the next one from the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from small_replanner import FIRST, profiled, replanner

from orchestrator.controller.adapt.memory_relief import MemoryRelief
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.events.types import Event, Issued, MemoryLimited, OutOfMemory, Record
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import JobData, Pending
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from planner.plan import Plan
from planner.profile import Profile
from planner.search.replan import Replanner
from workers.config import FreezeConfig
from workers.protocol.errors import MemoryShortage

SHORT = OutOfMemory(rank=7, place=1, plan=FIRST.key, step=3, shortage=MemoryShortage(held_bytes=20_000_000))


async def _never(plan: Plan, job: JobData) -> str:
    raise AssertionError("the job does not train")


class Controller:
    """The part of a controller that keeps to the ranks' memory."""

    def __init__(self, profile: Profile | None, view: JobView | None = None) -> None:
        self.view = view or JobView()
        self.logged: list[Event] = []
        self.state = Pending()
        self.planning = CurrentReplanner(replanner(profile))
        setup: Any = SimpleNamespace(config=SimpleNamespace(device="cpu", freeze=FreezeConfig()))
        loop: Any = self
        self.relief = MemoryRelief(setup, loop, lambda: self.view, self.planning, _never)

    def post(self, stimulus: Stimulus) -> None:
        assert isinstance(stimulus, Noted)
        self.take(stimulus.event)

    def take(self, event: Event) -> None:
        self.logged.append(event)
        self.view.fold(Record(time_s=1.0, event=event))
        self.relief.fold(event)

    def of(self, *ranks: int) -> Replanner:
        return self.planning.of(ranks)


def test_a_shortage_limits_the_rank_wherever_it_is_and_the_next_controller_knows() -> None:
    first = Controller(profiled())
    first.take(Issued(plan=FIRST))
    first.take(SHORT)
    limited = first.logged[-1]
    assert limited == MemoryLimited(
        rank=7, limit_bytes=19_000_000, reason="plan 1.1 took more than it has", step=3
    )
    assert first.of(0, 7).limits == (None, 19_000_000)
    assert first.of(7, 0).limits == (19_000_000, None)
    assert first.of(0, 1) is first.planning.replanner
    assert first.of(0, 7) is first.of(0, 7), "it remembers its answers"

    again = Controller(profiled(), JobView.from_json(first.view.to_json()))
    again.relief.go_on()
    assert again.of(0, 7).limits == (None, 19_000_000)
    assert again.logged == []


def test_a_limit_only_falls() -> None:
    controller = Controller(profiled())
    controller.take(Issued(plan=FIRST))
    controller.take(SHORT)
    controller.take(OutOfMemory(rank=7, place=1, plan=FIRST.key, step=5, shortage=MemoryShortage()))
    assert controller.planning.limits == {7: 19_000_000}


def test_without_a_profile_everything_recomputes_from_then_on() -> None:
    first = Controller(None)
    first.take(Issued(plan=FIRST))
    assert not first.planning.replanner.first.recompute
    first.take(SHORT)
    assert first.planning.replanner.first.recompute == (0, 1, 2)
    plan, schedule = first.of(0, 7).plan_for(2, epoch=1, version=2, reason="", domains=["a", "a"])
    assert plan.recompute == (0, 1, 2)
    assert any(str(action).startswith("0R") for action in schedule.programs[0])

    again = Controller(None, JobView.from_json(first.view.to_json()))
    again.relief.go_on()
    assert again.planning.replanner.first.recompute == (0, 1, 2)


def test_a_shortage_under_an_unknown_plan_changes_nothing() -> None:
    controller = Controller(profiled())
    controller.take(SHORT)
    assert controller.planning.limits == {}
