"""Freezing changed on a real elastic job: the same step on all ranks, through a loss, a resume and a replay."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from planner_beside import PlannerBeside
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.commands.table import parsed
from orchestrator.controller.freeze.freeze_control import FreezeControl
from orchestrator.controller.freeze.freeze_watch import Costly
from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import JobFinished
from orchestrator.lifecycle.stimuli import SaveOrStop
from orchestrator.prepare.replay import recorded
from orchestrator.prepare.settling import Settled
from planner.freezing import REFERENCE_AT, REFERENCE_EVERY, FreezeOverrides, FreezePlan
from workers.launch.ranks import LaunchedJob
from workers.protocol.errors import JobError
from workers.protocol.orders import CheckpointRef, Request
from workers.protocol.reports import FreezeReport, FreezeStarted, StepReport

STEPS = 60
OFF, ON, MORE, STOPPED = 14, 22, 30, 42
"""The steps after which something is asked."""
FREEZE = {"method": "timelyfreeze", "r_max": 0.8, "warm_up": 1, "monitoring": 9, "ramp": 10}
PASSES = {"forward_s": 0.002, "input_grad_s": 0.002}


def job(
    folder: Path, name: str = "changed", steps: int = STEPS, weight_grad_s: float = 0.006, **freeze: object
) -> Settled:
    return resolved(
        tiny(
            folder,
            name,
            job={"steps": steps, "sample_tokens": 0},
            pipeline={"ranks": 3, "microbatches": 2},
            cluster={"device": "emulated", "emulated": {**PASSES, "weight_grad_s": weight_grad_s}},
            elastic={"grow": False},
            freeze={**FREEZE, **freeze},
        )
    )


class ControlledJob:
    """A job without Ray, whose freezing is changed through its controller's own part.

    Args:
        view: of the earlier runs.
        asks: step -> what is asked once it is reported.
        changed: called with each change that is logged.
        turns: done one after the other, each once the newest plan has been followed over a reference step.
    """

    def __init__(
        self,
        made: Settled,
        view: JobView,
        asks: dict[int, Callable[[ControlledJob], Any]],
        changed: Callable[[ControlledJob, events.FreezeChanged], Any] = lambda it, change: None,
        turns: Iterable[Callable[[ControlledJob], Any]] = (),
        **order: Any,
    ) -> None:
        self.view = view
        self._turns, self._turn_at = deque(turns), sys.maxsize
        self.records: list[Record] = []
        self.said: list[str] = []
        self.asks = asks
        self._changed = changed
        self.running = ElasticJob(made, self._act, **order)
        self.control = FreezeControl(
            self.running.order,
            self.running.setup,
            self.running.loop,
            lambda: self.view,
            self.running.runtime.planning,
            PlannerBeside(lambda: None, self.running.loop.post, self.running.loop.spawn),
        )
        self._take(
            events.Submitted(
                job="changed",
                epoch=self.running.order.epoch,
                spec=made.spec.model_dump(mode="json"),
                resume=bool(self.running.order.checkpoints),
            )
        )

    def run(self) -> Ran:
        ran = self.running.run()
        assert_gone(ran.pids)
        return ran

    def ask(self, **arguments: object) -> None:
        """Ask for other settings, as `JobClient.freeze` does."""

        async def send() -> None:
            command = events.Commanded(
                id=str(len(self.said)), name="freeze", arguments=arguments, by="a test"
            )
            self._take(command)
            try:
                self.said.append(await self.control.change(parsed(command)))
            except JobError as error:
                self.said.append(str(error))

        self.running.loop.spawn(send())

    def _act(self, running: ElasticJob, event: events.Event) -> None:
        self._take(event)
        if isinstance(event, StepReport) and event.step in self.asks:
            self.asks.pop(event.step)(self)
        if isinstance(event, events.FreezeChanged):
            self._changed(self, event)
        if isinstance(event, FreezeStarted):
            assert event.plan.start is not None
            reference = next(
                step for step in count(event.plan.start) if step % REFERENCE_EVERY == REFERENCE_AT
            )
            self._turn_at = reference + 2
        if isinstance(event, StepReport) and event.step >= self._turn_at and self._turns:
            self._turn_at = sys.maxsize
            self._turns.popleft()(self)

    def _take(self, event: events.Event) -> None:
        self.records.append(Record(time_s=0.0, event=event))
        self.view.fold(self.records[-1])


def shares(log: list[events.Event]) -> dict[int, float]:
    """Step -> the mean planned share of its actions."""
    found: dict[int, list[float]] = {}
    for event in log:
        if isinstance(event, FreezeReport):
            found.setdefault(event.step, []).extend(action.planned for action in event.actions)
    return {step: mean(each) if each else 0.0 for step, each in sorted(found.items())}


def test_a_job_freezes_as_much_as_pays_and_less_where_it_costs(tmp_path: Path) -> None:
    """Down to nothing, as a user would have it."""

    def less(progress: float) -> Callable[[ControlledJob], object]:
        return lambda it: it.running.loop.spawn(it.control.freeze_less(Costly("it costs", progress)))

    turns = [
        less(0.95),
        less(0.97),
        lambda it: it.running.post(SaveOrStop(Request.STOP)),
    ]
    asks = {OFF: lambda it: it.ask(least_update=0.3)}
    ran = ControlledJob(
        # On a busy machine each pass takes some milliseconds more: those of weight gradients stand out all the same.
        job(tmp_path, steps=1000, weight_grad_s=0.03, r_max="auto", least_update=0.4),
        JobView(),
        asks,
        turns=turns,
    )
    log = ran.run().log
    first, second = (each for each in log if isinstance(each, events.FreezeSolved))
    assert first.progress is not None
    assert second.progress is not None
    assert 0.3 - 1e-6 <= first.progress <= 1.0
    assert max(0.975, first.progress) - 1e-6 <= second.progress <= 1.0
    assert any(ratio for _, _, ratio in first.ratios), "weight gradients take most of a step"
    assert first.kappa < first.progress
    changes = [each for each in log if isinstance(each, events.FreezeChanged)]
    assert [(each.method, each.r_max, each.by) for each in changes] == [
        ("timelyfreeze", "auto", "a test"),
        ("timelyfreeze", "auto", "auto"),
        ("none", "auto", "auto"),
    ]
    assert [each.sentence for each in changes[1:]] == [
        "the job set the freeze method to timelyfreeze with r_max = auto and least_update = 0.975: it costs",
        "the job turned freezing off: it costs",
    ]
    planned = shares(log)
    much, little, off = (each.plan.start or 0 for each in log if isinstance(each, FreezeStarted))
    whole = {step for step in planned if step % REFERENCE_EVERY == REFERENCE_AT or step >= off}
    assert all(planned[step] > 0.0 for step in planned if much <= step < little and step not in whole)
    assert all(planned[step] == 0.0 for step in whole if step >= much)
    # With so little left to give up, it may be that nothing pays.
    assert any(planned[step] > 0.0 for step in range(little, off)) == any(
        ratio for _, _, ratio in second.ratios
    )


def test_changes_survive_a_loss_a_resume_and_a_replay(tmp_path: Path) -> None:
    made = job(tmp_path)
    first = ControlledJob(
        made,
        JobView(),
        {
            3: lambda it: it.ask(method="timelyfrieze"),
            4: lambda it: it.ask(r_max=1.5),
            OFF: lambda it: it.ask(method="none"),
            ON: lambda it: it.ask(method="timelyfreeze", r_max=0.3),
            MORE: lambda it: it.ask(r_max=0.9),
            STOPPED: lambda it: it.running.post(SaveOrStop(Request.STOP)),
        },
        # Between the log and the ranks: the plan is sent again to those that go on.
        changed=lambda it, change: it.running.signal(2) if change.r_max == 0.9 else None,
    )
    ran = first.run()
    assert isinstance(ran.state, JobFinished)
    assert ran.state.stopped
    assert [failed.rank for failed in ran.of(events.RankFailed)] == [2]
    assert first.said == [
        "'timelyfrieze' is no freeze method: did you mean timelyfreeze? There are none, timelyfreeze, apf, autofreeze,"
        " timelyfreeze+apf, timelyfreeze+autofreeze, pipetransformer, prefix,"
        " timelyfreeze+pipetransformer, timelyfreeze+prefix, auto",
        "r_max = 1.5 is no share: give the largest mean freeze ratio of a stage, from 0 to 1, or auto",
        "freezes nothing from a commit on",
        "freezes by timelyfreeze with r_max = 0.3 from a commit on",
        "freezes by timelyfreeze with r_max = 0.9 from a commit on",
    ]

    # Each change is logged before the ranks follow it, from a step soon after the request.
    changes, started = ran.of(events.FreezeChanged), ran.of(FreezeStarted)
    assert [(each.method, each.r_max, each.by) for each in changes] == [
        ("none", 0.8, "a test"),
        ("timelyfreeze", 0.3, "a test"),
        ("timelyfreeze", 0.9, "a test"),
    ]
    assert [each.plan.key for each in started] == [each.plan.key for each in changes]
    off, on, more = (each.plan.start or 0 for each in started)
    for change, start, asked in zip(changes, (off, on, more), (OFF, ON, MORE), strict=True):
        assert asked < change.from_step <= start <= asked + 8
    frozen = shares(ran.log)
    assert all(frozen[step] == 0 for step in range(off, on))
    assert 0 < frozen[on] <= 0.3 + 1e-9
    # From the third change on a rank is lost, with its last reports: the mean is over other actions.
    assert len({round(frozen[step], 6) for step in range(on, MORE)}) <= 1
    assert 0.3 < frozen[more] <= 0.9 + 1e-9
    assert first.view.freeze.method == "timelyfreeze"
    assert (first.view.freeze.r_max, first.view.freeze.since) == (0.9, more)
    answers = {entry.command.id: entry.answer for entry in first.view.commands.entries.values()}
    assert all(answer is not None and answer.done for id, answer in answers.items() if id in "234")

    # A resumed run follows the same settings, and may change them once more.
    saved = first.view.checkpoints[-1]
    assert first.view.freeze_history().plans == tuple(each.plan for each in started)
    second = ControlledJob(
        made,
        first.view,
        {50: lambda it: it.ask(method="none")},
        epoch=2,
        generation=10,
        checkpoints=(CheckpointRef(path=saved.path, step=saved.step),),
        freezing=first.view.freeze_history(),
    )
    resumed = second.run()
    assert isinstance(resumed.state, JobFinished)
    assert resumed.steps == list(range(saved.step + 1, STEPS + 1))
    again = shares(resumed.log)
    last = second.view.freeze.since
    assert last > 50
    # The mean over actions changes a little with their number.
    assert all(again[step] == pytest.approx(frozen[more], abs=0.05) for step in range(saved.step + 1, last))
    assert again[last] == 0

    # The log alone gives the same bits, on one rank without a controller and on three with losses.
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for record in (*first.records, *second.records):
        log.append(record)
    log.close()
    history = recorded(path, made)
    assert len(history.plans) == 4
    expected = run_threads(LaunchedJob(made.config, made.plan, made.schedule, freeze_plans=history.plans))
    assert resumed.state_sha256 == expected.state_sha256
    third = ControlledJob(
        job(tmp_path, "replayed"),
        JobView(),
        {
            off: lambda it: it.running.signal(0),
            on: lambda it: it.ask(method="none"),
        },
        freezing=history,
    )
    replayed = third.run()
    assert third.said == [
        "the job replays the freezing of a log and decides nothing itself: freeze in another run"
    ]
    assert replayed.state_sha256 == expected.state_sha256
    assert len(replayed.of(events.RankFailed)) == 1
    untouched = run_threads(
        LaunchedJob(made.config, made.plan, made.schedule, freeze_plans=history.plans[:1])
    )
    assert untouched.state_sha256 != expected.state_sha256


def test_only_the_request_whose_plan_is_logged_waits_for_the_next_controller(tmp_path: Path) -> None:
    it = ControlledJob(job(tmp_path), JobView(), {})
    for id, name, arguments in (
        ("logged", "freeze", {"method": None, "r_max": 0.9}),
        ("waits", "freeze", {"method": "none", "r_max": None}),
        ("other", "drain", {}),
    ):
        it.view.fold(Record(time_s=0.0, event=events.Commanded(id=id, name=name, arguments=arguments)))

    def again() -> list[str]:
        return [entry.command.id for entry in it.view.commands.pending() if it.control.again(entry)]

    assert again() == []
    plan = FreezePlan(
        epoch=1, version=1, ratios=(), control=FreezeOverrides(method="timelyfreeze", r_max=0.9)
    )
    change = events.FreezeChanged(
        from_step=2, method="timelyfreeze", r_max=0.9, by="", plan=plan, id="logged"
    )
    it.view.fold(Record(time_s=0.0, event=change))
    assert again() == ["logged"]
