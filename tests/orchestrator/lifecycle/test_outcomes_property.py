"""In a simulated cluster where anything may happen, every command has exactly one outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_jobs import checkpoint_report
from made_up_cluster import LAYERS, World

from orchestrator.events import types as events
from orchestrator.history.command_table import CommandTable
from orchestrator.lifecycle.effects import AppendToLog, Effect, LogRegroup, Propose
from orchestrator.lifecycle.migration import RequestedMove
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.states import Closing, JobFailed, JobFinished, JobPaused, Live, Training
from orchestrator.lifecycle.stimuli import (
    Aborted,
    FreezeAsked,
    Going,
    Migrate,
    PauseAsked,
    Released,
    Reported,
    ResumeAsked,
    SaveOrStop,
    ScaleRequested,
    Stimulus,
    TrainingEnded,
)
from planner.freezing import FreezeOverrides, FreezePlan
from planner.plan import PlanError
from planner.search.layer_move import with_layers
from workers.config import ElasticConfig
from workers.protocol.orders import Request
from workers.protocol.reports import FreezeStarted, Outcome

CONTROL = FreezeOverrides(method="none", r_max=0.5)


class Commanded(World):
    """A cluster whose job gets commands as well, and logs as its controller does."""

    def __init__(self, seed: int, elastic: ElasticConfig) -> None:
        super().__init__(seed, elastic)
        self.log: list[events.Event] = []
        self.table = CommandTable()
        self.proposed: FreezePlan | None = None
        self.freezes = 0

    def record(self, event: events.Event) -> None:
        for each in self.table.logged(event):
            self.log.append(each)
            self.table.fold(each)

    def obey(self, effect: Effect) -> None:
        match effect:
            case AppendToLog(event) | LogRegroup(event):
                self.record(event)
            case Propose(plan):
                self.proposed = plan
            case _:
                pass
        super().obey(effect)

    def happen(self) -> None:
        if self.random.random() < 0.4:
            self.ask()
        else:
            super().happen()

    def ask(self) -> None:
        """Send one of the commands, as the controller does: checked against the state, logged, then posted."""
        id = f"c{len(self.log)}"
        name = self.random.choice(
            ["freeze", "move", "scale", "drain", "pause", "resume", "checkpoint", "stop"]
        )
        if name == "stop" and self.random.random() < 0.8:
            return
        stimulus = self.stimulus(name, id)
        if stimulus is not None and self.table.get(id) is None:
            self.record(events.Commanded(id=id, name=name, arguments={}))
            self.answers.append(stimulus)

    def stimulus(self, name: str, id: str) -> Stimulus | None:
        state = self.state
        if isinstance(state, JobPaused):
            return {"resume": ResumeAsked(), "stop": SaveOrStop(Request.STOP)}.get(name)
        if not isinstance(state, Live):
            return None
        match name:
            case "freeze":
                # Two requests may arrive in another order than they were numbered in.
                self.freezes += self.random.randrange(-1, 3)
                plan = FreezePlan(epoch=1, version=self.freezes, ratios=(), control=CONTROL)
                change = events.FreezeChanged(from_step=1, method="none", r_max=0.5, by="", plan=plan, id=id)
                return FreezeAsked(change) if isinstance(state, Training) else None
            case "move" if isinstance(state, Training):
                now, schedule = expected(state.job)
                layer, rank = self.random.randrange(LAYERS), self.random.randrange(now.pipeline_ranks)
                try:
                    plan = with_layers(now, layer, layer + 1, rank)
                except PlanError:
                    return None
                mode = self.random.choice(["live", "stop"])
                return Migrate(
                    RequestedMove(plan=plan, schedule=schedule, mode=mode, asked_s=0.0, base=now, id=id)
                )
            case "scale":
                places = self.random.randrange(1, 6)
                return ScaleRequested(events.Scaled(ranks=places, spares=0, places=places, id=id))
            case "drain" if self.ranks:
                rank = self.random.choice(sorted(self.ranks))
                return Going(frozenset({rank}), "request", 9.0, f"n{rank}", "h", id)
            case "pause" | "resume" | "checkpoint" | "stop":
                requests = {"checkpoint": SaveOrStop(Request.CHECKPOINT), "stop": SaveOrStop(Request.STOP)}
                return PauseAsked() if name == "pause" else requests.get(name)
            case _:
                return None

    def commit(self, reached: int | None = None) -> None:
        asked, told, before = set(self.requests), self.told, self.training
        super().commit(reached)
        if self.told == told:
            return
        step, proposed = self.told, self.proposed
        if proposed is not None and self.random.random() < 0.5:
            self.proposed = None
            self.answers.append(Reported(FreezeStarted(plan=replace(proposed, start=step + 2))))
        if Request.STOP in asked and self.training == before:
            path = f"/{step}.end"
            self.on_disk[path] = step
            self.take(Reported(checkpoint_report(step, path)))
            digests = tuple((layer, "a") for layer in range(LAYERS))
            ends = (Outcome(rank=rank, step=step, stopped=True, layer_digests=digests) for rank in before)
            self.answers += [TrainingEnded(end, self.round) for end in ends]
            self.training = ()

    def end(self) -> None:
        """The job's end, whatever state it is in."""
        if isinstance(self.state, Live):
            self.take(Aborted())
        if isinstance(self.state, Closing):
            self.take(Released())


DRAWN = {"seed": st.integers(0, 2**32), "spares": st.integers(0, 2), "grow": st.booleans()}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**DRAWN)
def test_every_command_has_exactly_one_outcome(**drawn: Any) -> None:
    check_that_every_command_has_one_outcome(**drawn)


@pytest.mark.soak
@settings(max_examples=300, deadline=None, derandomize=True)
@given(**DRAWN)
def test_every_command_of_many_has_exactly_one_outcome(**drawn: Any) -> None:
    check_that_every_command_has_one_outcome(**drawn)


def check_that_every_command_has_one_outcome(seed: int, spares: int, grow: bool) -> None:
    world = Commanded(seed, ElasticConfig(spares=spares, grow=grow, redundancy="peer", attempts=1000))
    world.run(60)
    world.end()
    assert isinstance(world.state, JobFinished | JobFailed)
    asked = [event.id for event in world.log if isinstance(event, events.Commanded)]
    answered = [event.id for event in world.log if isinstance(event, events.Answered)]
    assert sorted(answered) == sorted(asked)
    assert isinstance(world.log[-1], events.Finished | events.Failed), "the end is the log's last line"
