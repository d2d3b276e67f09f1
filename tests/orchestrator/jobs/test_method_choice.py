"""A job that chooses how to freeze, with real ranks: what it takes, when, why, and the same bits again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from ray_jobs import resolved
from test_freeze_control import ControlledJob
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.analysis.freeze_numbers import freeze_numbers
from orchestrator.controller.event_loop import Work
from orchestrator.controller.freeze import freeze_control
from orchestrator.controller.freeze.method_choice import EVERY
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.effects import Effect, Train
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from planner.ir import Action, ActionKind
from planner.profile import Profile
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import ActionSpan, FreezeStarted, PrefixFrozen, StepReport, TimelineReport
from workers.step.minibatch import Minibatch

MONITORED = 5
LONG_S = 600.0
"""For which the rank may wait."""
DECIDING = "deciding"
"""File that is there while the controller decides."""


CHOOSES = {
    "method": "auto",
    "least_update": 0.05,
    "warm_up": 1,
    "monitoring": MONITORED,
    "ramp": MONITORED,
    "pack": "off",
}


def choosing(
    folder: Path,
    freeze: dict[str, Any] = CHOOSES,
    *,
    steps: int = EVERY + 40,
    weight_grad_s: float = 0.001,
    rule: str = "sgd",
) -> Settled:
    """On one rank, where a step is as long as its layers' times are."""
    return resolved(
        tiny(
            folder,
            "choosing",
            job={"steps": steps, "sample_tokens": 0, "timeline_every": 0},
            pipeline={"ranks": 1, "microbatches": 1, "microbatch_size": 4},
            optimizer={"name": rule, "lr": 0.01},
            cluster={
                "device": "emulated",
                "emulated": {"forward_s": 0.001, "input_grad_s": 0.001, "weight_grad_s": weight_grad_s},
            },
            elastic={"hang_timeout_s": LONG_S},
            freeze=freeze,
        )
    )


def as_emulated(made: Settled) -> Profile:
    """A profile of the job's one rank with the times that its layers wait out."""
    emulated = made.config.cluster.emulated
    profile = made_profile(made.outline.layers, made.outline.parameters, 1)
    times = zip(
        profile.model.layers,
        *(
            each if isinstance(each, tuple) else (each,) * len(profile.model.layers)
            for each in (emulated.forward_s, emulated.input_grad_s, emulated.weight_grad_s)
        ),
        strict=True,
    )
    layers = tuple(
        replace(
            layer,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            matrices=tuple(replace(one, weight_grad_s=weight_grad_s) for one in layer.matrices),
        )
        for layer, forward_s, input_grad_s, weight_grad_s in times
    )
    return replace(profile, model=replace(profile.model, layers=layers))


Passes = Callable[[int, str], float]
"""(step, action) -> seconds that the action takes."""


def one_after_the_other(timeline: TimelineReport, passes: Passes | None = None) -> TimelineReport:
    """The passes of a step with nothing in between, as long as they were or as `passes` says."""
    spans, now_s = list[ActionSpan](), 0.0
    for span in timeline.spans:
        took_s = span.end_s - span.start_s if passes is None else passes(timeline.step, span.action)
        spans.append(replace(span, start_s=now_s, end_s=now_s + took_s))
        now_s = spans[-1].end_s
    return replace(timeline, spans=tuple(spans), step_s=now_s)


def waits(rank: int, folder: Path) -> None:
    """Have a rank begin no step while there is `DECIDING` in `folder`."""
    run = Minibatch.run

    def waiting(self: Minibatch, *arguments: Any) -> Any:
        while (folder / DECIDING).exists():
            time.sleep(0.005)
        return run(self, *arguments)

    Minibatch.run = waiting


class ChoosingJob(ControlledJob):
    """A job whose planner solves its program and which chooses, as in its controller.

    Its rank waits for each decision: on a busy machine one takes as long as all of the job's steps. And its steps take
    as long as its passes, not as long as the machine does with other work in between.
    """

    def __init__(
        self, made: Settled, folder: Path, patch: pytest.MonkeyPatch, passes: Passes | None = None
    ) -> None:
        self._passes = passes
        self._deciding = folder / DECIDING
        for name in ("chosen", "decided", "decide"):
            patch.setattr(freeze_control, name, self._waited_for(getattr(freeze_control, name)))
        super().__init__(made, JobView(), {}, profile=as_emulated(made), rig=partial(waits, folder=folder))
        carry_out = self.running.runtime.carry_out

        def accompanied(effect: Effect) -> Work | None:
            if isinstance(effect, Train):
                self.control.accompany(effect.step)
            return carry_out(effect)

        self.running.runtime.carry_out = accompanied

    def _waited_for(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(*arguments: Any) -> Any:
            self._deciding.touch()
            try:
                return decide(*arguments)
            finally:
                self._deciding.unlink(missing_ok=True)

        return decided

    def _take(self, event: events.Event) -> None:
        if isinstance(event, TimelineReport):
            event = one_after_the_other(event, self._passes)
        super()._take(event)
        if not isinstance(event, events.Submitted):
            self.control.fold(event)
        if isinstance(event, StepReport) and event.step == MONITORED and self.view.freeze.solved is None:
            self._deciding.touch()
        if isinstance(event, events.FreezeSolved):
            self._deciding.unlink(missing_ok=True)


def test_a_job_takes_the_prefix_that_is_predicted_to_come_to_a_loss_sooner_and_gives_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first layers at once, whose gradients are small; until those of the others have become small too."""
    made = choosing(tmp_path)
    job = ChoosingJob(made, tmp_path, monkeypatch)
    ran = job.run()
    assert isinstance(ran.state, JobFinished)
    started = ran.of(FreezeStarted)
    solved, frozen, thawed = (each.plan for each in started)
    assert solved.control is None
    changes = ran.of(events.FreezeChanged)
    assert [(each.method, each.by, each.plan.key) for each in changes] == [
        ("prefix", "auto", frozen.key),
        ("auto", "auto", thawed.key),
    ]
    for each in changes:
        assert re.search(r"take \d\.\d\d of the time without freezing, and \d\.\d\d as before$", each.reason)
    assert frozen.control is not None
    assert thawed.control is not None
    assert frozen.control.chosen
    assert thawed.control.chosen
    assert (frozen.start or 0) < EVERY < (thawed.start or 0)
    moved = ran.of(PrefixFrozen)
    assert [(each.step, each.layers) for each in moved] == [
        (frozen.start, frozen.control.prefix),
        (thawed.start, 0),
    ]

    # One step in twenty tells what layers' gradients are; of frozen ones it tells nothing.
    told = {each.step: each.energies for each in ran.of(TimelineReport) if each.energies}
    until = made.config.job.steps
    assert {step for step in told if MONITORED < step < until} == {*range(11, until, 20)}
    for step, energies in told.items():
        layers = next((each.layers for each in reversed(moved) if each.step <= step), 0)
        assert [energy > 0.0 for energy in energies] == [layer >= layers for layer in range(len(energies))]

    # The log's plans alone give the same bits.
    plans = (solved, frozen, thawed)
    again = run_threads(LaunchedJob(made.config, made.plan, made.schedule, freeze_plans=plans))
    assert ran.state_sha256 == again.state_sha256
    assert not [each for each in ran.of(events.Warned) if "freez" in each.text]


def test_a_freeze_program_works_above_a_prefix_and_is_solved_again_once_the_prefix_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grows = 40
    freeze = {
        "method": "timelyfreeze+prefix",
        "schedule": ((1, 1), (grows, 3)),
        "least_update": 0.3,
        "warm_up": 1,
        "monitoring": MONITORED,
        "ramp": MONITORED,
        "pack": "off",
    }
    # Under a rule that divides by the size of gradients a part of each layer is worth freezing.
    made = choosing(tmp_path, freeze, steps=80, weight_grad_s=0.01, rule="adamw")

    def passes(step: int, action: str) -> float:
        """As long as the layers' modelled times are: on a busy machine these are lost in what comes on top."""
        layers = 6
        if Action.parse(action).kind is ActionKind.FORWARD:
            return 0.001 * layers
        return (layers - 1) * (0.001 if step > MONITORED - 2 else 0.011)

    job = ChoosingJob(made, tmp_path, monkeypatch, passes)
    ran = job.run()
    assert isinstance(ran.state, JobFinished)
    assert [(each.step, each.layers) for each in ran.of(PrefixFrozen)] == [(1, 1), (grows, 3)]
    first, again = ran.of(events.FreezeSolved)
    before, after = (each.plan for each in ran.of(FreezeStarted))
    assert (before.key, after.key) == (first.plan.key, again.plan.key)
    assert MONITORED < (before.start or 0) < grows <= (after.start or 0)
    for solved, frozen in ((first, 1), (again, 3)):
        assert not any(map(any, solved.plan.ratios[:frozen])), "the prefix is no business of the program"
        assert solved.progress is not None
        assert 0.3 - 1e-6 <= solved.progress <= 1.0
        assert solved.kappa <= solved.progress
    assert any(map(any, first.plan.ratios[1:3])), "it pays above, too"
    assert first.energies[0] == 0.0
    assert all(first.energies[1:])

    # Of what was asked for nothing is missing in the log: its plans alone give the same bits.
    twice = run_threads(LaunchedJob(made.config, made.plan, made.schedule, freeze_plans=(before, after)))
    assert ran.state_sha256 == twice.state_sha256
    assert not [each for each in ran.of(events.Warned) if "freez" in each.text]
    numbers = freeze_numbers(job.view)
    assert numbers is not None
    assert numbers.above_prefix
    assert numbers.predicted_kappa == again.kappa
    assert numbers.predicted_left == numbers.progress == again.progress
