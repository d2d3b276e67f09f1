"""Moves that are requested at any time all come to an end, one after the other, with a true answer each.

The ranks here obey the lifecycle as the real ones do: they take up a plan at a commit at which all of them are ready,
and their reports and orders arrive late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_jobs import Job, order_of, step_report, train

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import Switch
from orchestrator.lifecycle.migration import Mode, RequestedMove
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.stimuli import Migrate, RankLost, Reported
from planner.ir import Schedule
from planner.plan import Plan
from planner.rank_program import rank_programs
from planner.schedule.passes import with_stage_ranks
from planner.search.layer_move import with_layers
from planner.search.standbys import assign
from planner.shards import Piece
from workers.commit.next_plan import NextPlan
from workers.protocol.reports import SwitchReport

RANKS, LAYERS = 4, 12
ROUNDS = 240
"""More than enough for all that is under way."""


@dataclass
class Place:
    """A rank, reduced to the layers, or shards, that it holds."""

    number: int
    owned: set[Piece]
    current: set[Piece]
    """Its copies that are up to date."""
    coming: set[Piece] = field(default_factory=set)
    prepared: NextPlan | None = None
    orders: deque[NextPlan] = field(default_factory=deque)
    """Plans on their way to it."""
    reports: deque[SwitchReport] = field(default_factory=deque)
    """Reports on their way to the controller."""

    def ready(self) -> bool:
        return self.prepared is not None and self.prepared.ready(
            self.number, self.owned, self.current, self.coming
        )


class World:
    """A training job and its ranks. Several pipelines share out states."""

    def __init__(self, *, redundant: bool, pipelines: int = 1) -> None:
        self.stages = RANKS // pipelines
        order = order_of(self.stages, layers=LAYERS)
        order = replace(order, plan=replace(order.plan, replicas=pipelines, shard="optimizer"))
        self.redundant = redundant
        plan = self.with_standbys(order.plan)
        self.job = train(Job(replace(order, plan=plan)))
        self.places = [
            Place(place, set(plan.pieces_of_place(place)), set(plan.copies_at(place)))
            for place in range(RANKS)
        ]
        self.step = 0
        self.seen = len(self.job.without_logs)
        self.asked: list[str] = []

    def with_standbys(self, plan: Plan) -> Plan:
        domains = [f"node{place}" for place in range(RANKS)]
        return replace(plan, standbys=assign(plan, domains, (1,) * LAYERS) if self.redundant else ())

    def ask(self, giver: int, taker: int, mode: Mode = "live") -> None:
        """Request that the stage `giver` gives the layer next to `taker` to it, unless it is its last one."""
        now, schedule = expected(self.job.has)
        first, stop = now.layers[giver]
        layer = first if taker < giver else stop - 1
        if stop - first == 1:
            return
        self.request(with_layers(now, layer, layer + 1, now.stage_ranks[taker]), schedule, mode)

    def exchange(self, stage: int, mode: Mode) -> None:
        """Request that the ranks of `stage` and of the next one exchange their parts."""
        now, schedule = expected(self.job.has)
        ranks = list(now.stage_ranks)
        ranks[stage], ranks[stage + 1] = ranks[stage + 1], ranks[stage]
        placed = with_stage_ranks(schedule, ranks)
        self.request(replace(now, stage_ranks=tuple(ranks)), placed, mode)

    def request(self, plan: Plan, schedule: Schedule, mode: Mode) -> None:
        now, plan = expected(self.job.has)[0], self.with_standbys(plan)
        self.asked.append(str(len(self.asked)))
        move = RequestedMove(
            plan=plan, schedule=schedule, mode=mode, asked_s=0.0, base=now, id=self.asked[-1]
        )
        self.job.take(Migrate(move))
        self.obey()

    def obey(self) -> None:
        for effect in self.job.without_logs[self.seen :]:
            if isinstance(effect, Switch):
                for place in self.places:
                    program = rank_programs(effect.schedule)[place.number % self.stages]
                    place.orders.append(NextPlan(effect.plan, program, effect.held))
        self.seen = len(self.job.without_logs)

    def deliver(self, place: Place) -> None:
        if place.orders:
            place.prepared = place.orders.popleft()

    def hear(self, place: Place) -> None:
        if place.reports:
            self.job.take(Reported(place.reports.popleft()))
            self.obey()

    def commit(self) -> None:
        """All ranks commit a step: they switch if all are ready for one plan. Copies then on their way arrive."""
        self.step += 1
        self.job.take(Reported(step_report(self.step, generation=3)))
        switching = (
            all(place.ready() for place in self.places)
            and len({place.prepared.key for place in self.places if place.prepared is not None}) == 1
        )
        for place in self.places:
            place.current |= place.coming
            place.coming = set()
            if switching and place.prepared is not None:
                self.switch(place, place.prepared)

    def switch(self, place: Place, following: NextPlan) -> None:
        known, copies = place.owned | place.current, set(following.plan.copies_at(place.number))
        place.owned = set(following.plan.pieces_of_place(place.number))
        assert place.owned <= known, "a rank owns a layer that it does not have"
        place.current, place.coming, place.prepared = copies & known, copies - known, None
        plan = following.plan
        place.reports.append(
            SwitchReport(
                step=self.step,
                rank=place.number,
                epoch=plan.epoch,
                version=plan.version,
                taken=(),
                given=(),
                brought_bytes=1,
                brought_s=0.0,
                stall_s=0.0,
                switched_s=0.0,
            )
        )

    def finish(self) -> None:
        """Everything that is under way arrives."""
        for _ in range(ROUNDS):
            for place in self.places:
                while place.orders:
                    self.deliver(place)
            self.commit()
            for place in self.places:
                while place.reports:
                    self.hear(place)

    def answers(self) -> dict[str, bool]:
        told = [event for event in self.job.logged if isinstance(event, events.Answered)]
        assert len({answer.id for answer in told}) == len(told), "a command has two outcomes"
        return {answer.id: answer.done for answer in told}


HAPPENING = st.one_of(
    st.tuples(st.just("commit"), st.just(0), st.just(0)),
    st.tuples(st.just("deliver"), st.integers(0, RANKS - 1), st.just(0)),
    st.tuples(st.just("hear"), st.integers(0, RANKS - 1), st.just(0)),
    st.tuples(st.just("ask"), st.integers(0, RANKS - 2), st.sampled_from([0, 1])),
    st.tuples(st.just("exchange"), st.integers(0, RANKS - 2), st.just(0)),
)


DRAWN = {
    "happenings": st.lists(HAPPENING, min_size=20, max_size=60),
    "redundant": st.booleans(),
    "pipelines": st.sampled_from([1, 2]),
    "mode": st.sampled_from(["live", "deferred"]),
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(**DRAWN)
def test_moves_that_are_requested_at_any_time_all_end(**drawn: Any) -> None:
    check_that_all_moves_end(**drawn)


@pytest.mark.soak
@settings(max_examples=60, deadline=None, derandomize=True)
@given(**DRAWN)
def test_moves_that_are_requested_at_many_times_all_end(**drawn: Any) -> None:
    check_that_all_moves_end(**drawn)


def check_that_all_moves_end(
    happenings: list[tuple[str, int, int]], redundant: bool, pipelines: int, mode: Mode
) -> None:
    world = World(redundant=redundant, pipelines=pipelines)
    for what, place, back in happenings:
        number = place if what in ("deliver", "hear") else place % (world.stages - 1)
        match what:
            case "commit":
                world.commit()
            case "deliver":
                world.deliver(world.places[number])
            case "hear":
                world.hear(world.places[number])
            case "exchange":
                world.exchange(number, mode)
            case _:
                world.ask(number + back, number + 1 - back, mode)
    world.finish()
    intents = world.job.has.intents
    assert (intents.migration, intents.moves) == (None, ())
    assert world.answers() == dict.fromkeys(world.asked, True)
    plan, schedule = world.job.has.progress.plan, world.job.has.progress.schedule
    assert plan.stage_ranks == tuple(schedule.rank_of_stage[stage] for stage in range(plan.stages))
    assert [place.owned for place in world.places] == [
        set(plan.pieces_of_place(place)) for place in range(RANKS)
    ]
    moved = [event for event in world.job.logged if isinstance(event, events.Migrated)]
    assert len(moved) == len(world.asked)


@pytest.mark.parametrize(("giver", "taker"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_move_back_that_is_requested_while_old_copies_are_dropped_ends(giver: int, taker: int) -> None:
    """The ranks have dropped the old owner's copy already, and the controller does not know it yet."""
    world = World(redundant=True)
    world.ask(giver, taker)
    while not any(isinstance(event, events.Migrated) for event in world.job.logged):
        for place in world.places:
            world.deliver(place)
        world.commit()
        for place in world.places:
            world.hear(place)
    for place in world.places:
        world.deliver(place)
    world.commit()
    world.ask(taker, giver)
    world.finish()
    assert world.answers() == {"0": True, "1": True}


def test_the_end_of_the_generation_answers_the_move_under_way_and_those_that_wait() -> None:
    world = World(redundant=True)
    for giver, taker in ((1, 0), (2, 1)):
        world.ask(giver, taker)
    world.job.take(RankLost(2, "its process died", dead=True))
    assert world.answers() == {"0": False, "1": False}
    told = [event.text for event in world.job.logged if isinstance(event, events.Warned)]
    why = "is cancelled: the generation ended before they had moved"
    assert told == [f"the move of layer 3 {why}", f"the move of layer 6 {why}"]


def test_a_move_for_another_plan_than_the_one_in_force_is_refused() -> None:
    world = World(redundant=True)
    now, schedule = expected(world.job.has)
    plan = world.with_standbys(with_layers(now, 3, 4, 0))
    world.job.take(
        Migrate(RequestedMove(plan=plan, schedule=schedule, mode="live", asked_s=0.0, base=plan, id="x"))
    )
    assert world.answers() == {"x": False}
    assert world.job.has.intents.migration is None
