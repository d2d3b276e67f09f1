"""The planner of a job on a real Ray cluster: it freezes, and killing it in any phase costs only time."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pace import patient
from ray_jobs import Log, job_of, kill_controller, resolved
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.jobs import Command
from orchestrator.client.running import run
from orchestrator.controller.freeze.planner_link import TASK, PlannerLink
from orchestrator.controller.planning.planner_process import LIVES, PlannerProcess
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import fold
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from planner.freeze.decision import FreezeQuestion
from planner.freezing import FreezeOverrides, FreezePlan, Phase, Phases
from planner.plan import Plan
from planner.schedule.expand import schedule_of
from workers.config import FreezeConfig
from workers.protocol.reports import FreezeReport, FreezeStarted, StepReport, TimelineReport

PHASES = Phases(warm_up=25, monitoring=75, ramp=100)
"""Phases long enough for a planner to start and be killed in each, with steps of a quarter of a second."""
SHORT = Phases(warm_up=8, monitoring=48, ramp=54)
STEPS = 100
"""Steps of a job with `SHORT` phases."""
MANY = 400
"""As many as events may be late on a busy machine, and more."""
FAR = 10_000
"""A step that no test's job reaches."""


pytestmark = pytest.mark.usefixtures("two_nodes")


def freezing(
    folder: Path,
    name: str,
    phases: Phases,
    *,
    device: str = "emulated",
    steps: int = FAR,
    **sections: Any,
) -> Spec:
    """A job whose steps take an eighth of a second on two ranks, a quarter on one with `PHASES`."""
    unit_s = 0.005 if phases is PHASES else 0.004
    times = {"forward_s": unit_s, "input_grad_s": unit_s, "weight_grad_s": 2 * unit_s}
    return tiny(
        folder,
        name,
        job={"steps": steps, "sample_tokens": 0},
        pipeline={"ranks": 2, "microbatches": 2, **sections.pop("pipeline", {})},
        freeze={
            "method": "timelyfreeze",
            "r_max": 0.8,
            "warm_up": phases.warm_up,
            "monitoring": phases.monitoring,
            "ramp": phases.ramp,
        },
        cluster={"device": device, **({"emulated": times} if device == "emulated" else {})},
        **sections,
    )


def replayed(folder: Path, phases: Phases, plans: tuple[FreezePlan, ...], **changes: Any) -> str:
    """The digest of the same job with given freeze plans, without Ray, a planner or modelled times."""
    one = {"ranks": 1}
    spec = freezing(folder, "replayed", phases, device="cpu", steps=changes.pop("steps", FAR), pipeline=one)
    return run_threads(replace(job_of(spec), freeze_plans=plans, **changes)).state_sha256


class Assassin:
    """Kills each planner in its own phase, and stops the job once one has outlived them all."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.log = Log(self.act)
        self.pid: int | None = None
        """Process id of the live planner."""
        self.killed: list[Phase] = []
        """The phase of each kill."""
        self.step = 0
        self.stopped = False

    def act(self, record: events.Record) -> None:
        match record.event:
            case events.PlannerStarted(pid=pid):
                self.pid = pid
            case StepReport(step=step):
                self.step = step
            case _:
                pass
        self.inject()

    def inject(self) -> None:
        phase = PHASES.of(max(1, self.step))
        missed = len(self.killed) < list(Phase).index(phase)
        if missed or (len(self.killed) == len(Phase) and self.pid is not None):
            if not self.stopped:
                self.stopped = True
                BlockingJobClient().stop(self.job)
        elif self.pid is not None and len(self.killed) == list(Phase).index(phase) and self._ready(phase):
            os.kill(self.pid, signal.SIGKILL)
            self.pid = None
            self.killed.append(phase)

    def _ready(self, phase: Phase) -> bool:
        """In the ramp, whether the planner has been asked, even if its answer has not arrived; after the
        ramp, whether the job follows that answer."""
        if phase is Phase.RAMP:
            return any(report.step == PHASES.monitoring for report in self.log.of(TimelineReport))
        return phase is not Phase.STABLE or bool(self.log.of(FreezeStarted))


def test_a_planner_killed_in_every_phase_costs_nothing(tmp_path: Path) -> None:
    assassin = Assassin("fired")
    spec = freezing(tmp_path, "fired", PHASES, pipeline={"ranks": 1})
    done = run(spec, resume=False, observe=assassin.log, say=lambda text: None)
    log = assassin.log

    # Each fault fired in its phase, and another planner replaced each killed one.
    assert assassin.killed == list(Phase)
    assert [started.life for started in log.of(events.PlannerStarted)] == [1, 2, 3, 4, 5, 6]
    deaths = [warned.text for warned in log.of(events.Warned) if "the planner died" in warned.text]
    assert (
        deaths
        == ["the planner died: killed, out of memory, or its node is gone; another one takes its place"] * 5
    )
    assert len({started.pid for started in log.of(events.PlannerStarted)}) == 6

    log.assert_processes_gone()

    # There is one solution and one plan, logged before the ranks adopt it, and weight gradients are left out.
    (solved,), (started,) = log.of(events.FreezeSolved), log.of(FreezeStarted)
    assert log.events.index(solved) < log.events.index(started)
    assert started.plan == replace(solved.plan, start=started.plan.start)
    assert started.plan.start is not None
    assert started.plan.start > PHASES.monitoring
    assert solved.all_frozen_s <= solved.solved_s < solved.unfrozen_s
    assert 0 < solved.kappa < 1
    assert all(mean <= 0.8 + 1e-9 for mean in solved.mean_per_stage)
    frozen = [
        action.actual
        for report in log.of(FreezeReport)
        if report.step > PHASES.ramp
        for action in report.actions
    ]
    assert frozen
    assert max(frozen) > 0

    # The weights equal those of a run without a planner but with its decisions, and differ without them.
    assert isinstance(done.end, events.Finished)
    plans = fold(read_log(done.events_path)).freeze_history().plans
    assert plans == (started.plan,)
    assert replayed(tmp_path, PHASES, plans, stop_at=done.end.step) == done.end.state_sha256
    assert replayed(tmp_path, PHASES, (), stop_at=done.end.step) != done.end.state_sha256


@pytest.mark.soak  # the next start of a job, below, has the halves from the log as the next controller has
def test_a_controller_that_takes_over_measures_and_decides_nothing_again(tmp_path: Path) -> None:
    """It is killed between the halves of the monitoring, and again once the job follows the decision."""
    fired: list[int] = []

    def act(record: events.Record) -> None:
        if not isinstance(record.event, StepReport):
            return
        step = record.event.step
        due = SHORT.middle + 4 if not fired else SHORT.ramp + 8
        if len(fired) < 2 and step >= due and (not fired or log.of(FreezeStarted)):
            fired.append(step)
            kill_controller("decided")

    log = Log(act)
    spec = freezing(tmp_path, "decided", SHORT, steps=MANY, pipeline={"ranks": 1})
    end = run(spec, resume=False, observe=log, say=print).end
    assert isinstance(end, events.Finished)
    assert end.step == MANY
    assert SHORT.middle < fired[0] < SHORT.monitoring
    assert [each.epoch for each in log.of(events.Submitted)] == [1, 2, 3]
    (solved,), (started,) = log.of(events.FreezeSolved), log.of(FreezeStarted)
    # The solution uses both halves, the first of which the first controller received.
    assert solved.measured_unfrozen_s is not None
    assert solved.measured_all_frozen_s is not None
    assert started.plan == replace(solved.plan, start=started.plan.start)
    assert replayed(tmp_path, SHORT, (started.plan,), steps=MANY) == end.state_sha256
    log.assert_processes_gone()


@pytest.fixture(scope="module")
def stopped_while_monitoring(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that is stopped between the halves of its monitoring."""
    folder = tmp_path_factory.mktemp("monitoring")

    def act(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step == SHORT.middle:
            BlockingJobClient().stop("halves")

    log = Log(act)
    end = run(in_halves(folder, folder), resume=False, observe=log, say=lambda text: None).end
    assert isinstance(end, events.Finished)
    assert SHORT.middle < end.step < SHORT.monitoring
    assert log.of(events.FreezeSolved) == []
    return folder


def in_halves(folder: Path, data: Path, name: str = "halves", **changes: Any) -> Spec:
    """The job of `stopped_while_monitoring` in another folder, with the data of the first one."""
    checkpoint = {"every_steps": SHORT.monitoring, "keep": 10}
    text = {"path": str(data / "text.txt")}
    one = {"ranks": 1}
    return freezing(
        folder, name, SHORT, steps=STEPS, checkpoint=checkpoint, data=text, pipeline=one, **changes
    )


def test_resumed_runs_finish_the_monitoring_and_keep_the_decision_and_a_replay_takes_it(
    stopped_while_monitoring: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped_while_monitoring, tmp_path, dirs_exist_ok=True)
    spec = in_halves(tmp_path, stopped_while_monitoring)
    log = Log()
    first = PipelineTrainer(spec, resume=True, observe=log).fit()
    (started,) = log.of(FreezeStarted)
    assert log.of(events.FreezeSolved)
    assert started.plan.epoch == 2
    assert started.plan.start is not None
    assert first.metrics is not None
    assert first.metrics["steps"] == STEPS
    expected = replayed(tmp_path, SHORT, (started.plan,), steps=STEPS)
    assert first.metrics["state_sha256"] == expected
    assert first.metrics_dataframe is not None
    rows = first.metrics_dataframe.set_index("step")
    predicted = rows["predicted_step_s"].dropna()
    assert list(predicted.index) == list(range(started.plan.start, STEPS + 1))
    for name in ("kappa", "predicted_kappa", "p_eff", "average_p_eff", "time_to_accuracy"):
        assert list(rows[name].dropna().index) == list(predicted.index), name

    # Another job takes the recorded decisions, on a device that is not emulated.
    log = Log()
    again = in_halves(tmp_path, stopped_while_monitoring, "again", device="cpu")
    replay = PipelineTrainer(again, replay=tmp_path / "halves" / "events.jsonl", observe=log).fit()
    assert replay.metrics is not None
    assert replay.metrics["state_sha256"] == expected
    assert log.of(FreezeStarted) == [started]
    assert not log.of(events.FreezeSolved)

    # A run from before the decision repeats its steps as they were, without asking a planner.
    for checkpoint in (tmp_path / "halves" / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > SHORT.monitoring:
            shutil.rmtree(checkpoint)
    log = Log()
    second = run(spec, resume=True, observe=log, say=lambda text: None)
    assert log.of(StepReport)[0].step == SHORT.monitoring + 1
    assert log.of(events.PlannerStarted) == []
    assert log.of(FreezeStarted) == ([started] if started.plan.start > SHORT.monitoring + 1 else [])
    assert isinstance(second.end, events.Finished)
    assert second.end.state_sha256 == expected


def test_half_a_monitoring_of_another_partition_is_not_enough(stopped_while_monitoring: Path) -> None:
    """A job that resumes with two stages instead of one asks a planner, which lacks measurements."""
    history = fold(read_log(stopped_while_monitoring / "halves" / "events.jsonl")).freeze_history()
    assert history.plan is not None
    assert history.monitored
    plan = replace(history.plan, layers=((0, 2), (2, 6)), stage_ranks=(0, 1))
    started, warned = link_events(plan, history, SHORT.monitoring, lambda heard: len(heard) == 2)
    assert isinstance(started, events.PlannerStarted)
    steps = f"steps {SHORT.warm_up + 1} to {SHORT.middle} (upper bound)"
    assert warned == events.Warned(
        text=f"no rank reported how long B of stage 0 takes in the monitored {steps}, so the freeze program cannot be"
        " solved; the job trains on with nothing frozen"
    )


def test_freezing_is_switched_on_while_the_job_trains_and_its_controller_dies(tmp_path: Path) -> None:
    """The job's own method is none: it monitors first, and the planner decides for the next controller."""
    asked: list[Command] = []
    client = BlockingJobClient()

    def act(record: events.Record) -> None:
        match record.event:
            case StepReport(step=5):
                asked.append(client.freeze("switched", method="timelyfreeze", r_max=0.5, by="a test"))
            case events.FreezeChanged():
                kill_controller("switched")
            case FreezeStarted(plan=FreezePlan(control=FreezeOverrides(solved=True))):
                assert client.outcome(asked[0], timeout_s=60.0).done
                view = client.view("switched")
                assert (view.freeze.method, view.freeze.r_max) == ("timelyfreeze", 0.5)
            case StepReport(step=step) if len(log.of(FreezeStarted)) == 2:
                if step == (log.of(FreezeStarted)[-1].plan.start or 0) + 3:
                    client.stop("switched")
            case _:
                pass

    log = Log(act)
    one = {"ranks": 1}
    spec = freezing(tmp_path, "switched", SHORT, pipeline=one)
    never = FreezeConfig(method="none")
    end = run(spec.model_copy(update={"freeze": never}), resume=False, observe=log, say=print).end
    assert isinstance(end, events.Finished)
    assert [each.epoch for each in log.of(events.Submitted)] == [1, 2]
    (change,), (solved,) = log.of(events.FreezeChanged), log.of(events.FreezeSolved)
    began, follows = (started.plan for started in log.of(FreezeStarted))
    assert change.by == "a test"
    assert began == replace(change.plan, start=began.start)
    assert follows == replace(solved.plan, start=follows.start)
    assert follows.epoch == 2
    assert solved.measured_unfrozen_s is not None
    assert solved.measured_all_frozen_s is not None
    assert solved.solved_s < solved.unfrozen_s
    plain = freezing(tmp_path, "again", SHORT, device="cpu", pipeline=one)
    work = job_of(plain.model_copy(update={"freeze": never}))
    again = run_threads(replace(work, freeze_plans=(began, follows), stop_at=end.step))
    assert again.state_sha256 == end.state_sha256
    log.assert_processes_gone()


def test_a_planner_that_always_dies_is_given_up(tmp_path: Path) -> None:
    plan = resolved(freezing(tmp_path, "doomed", SHORT)).plan

    def killed(heard: list[events.Event]) -> bool:
        if isinstance(heard[-1], events.PlannerStarted):
            os.kill(heard[-1].pid, signal.SIGKILL)
        return isinstance(heard[-1], events.Warned) and "no other is started" in heard[-1].text

    # Monitoring has not begun, so no planner answers before it is killed.
    heard = link_events(plan, FreezeHistory(), 0, killed)
    lives = [started.life for started in heard if isinstance(started, events.PlannerStarted)]
    assert lives == list(range(1, LIVES + 1))
    assert isinstance(heard[-1], events.Warned)
    assert heard[-1].text.endswith("no other is started, and the job trains on with nothing frozen")


def link_events(
    plan: Plan, history: FreezeHistory, step: int, over: Callable[[list[events.Event]], bool]
) -> list[events.Event]:
    """What a controller's link to its planner has logged once `over` is true of the growing log."""
    heard: list[events.Event] = []
    done = asyncio.Event()

    def post(stimulus: Stimulus) -> None:
        assert isinstance(stimulus, Noted)
        heard.append(stimulus.event)
        if over(heard):
            done.set()

    async def ask() -> None:
        question = FreezeQuestion(plan=plan, schedule=schedule_of(plan), phases=SHORT, r_max=0.8)
        planner = PlannerProcess(lambda: None, post, asyncio.ensure_future)
        running = asyncio.ensure_future(PlannerLink(planner, question, history, 2, post).run(step))
        async with asyncio.timeout(patient(120)):
            await done.wait()
        planner.drop(TASK)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(ask())
    return heard
