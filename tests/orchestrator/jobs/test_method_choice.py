"""A job that chooses how to freeze, with real ranks: what it takes, when, why, and the same bits again."""

from __future__ import annotations

import re
from pathlib import Path

from made_profile import made_profile
from ray_jobs import resolved
from test_freeze_control import ControlledJob
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.event_loop import Work
from orchestrator.controller.freeze.method_choice import EVERY
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.effects import Effect, Train
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FreezeStarted, PrefixFrozen, TimelineReport

MONITORED = 5


def choosing(folder: Path) -> Settled:
    """On one rank, where a step is as long as its layers' times are."""
    return resolved(
        tiny(
            folder,
            "choosing",
            job={"steps": EVERY + 40, "sample_tokens": 0, "timeline_every": 0},
            pipeline={"ranks": 1, "microbatches": 2},
            cluster={
                "device": "emulated",
                "emulated": {"forward_s": 0.001, "input_grad_s": 0.001, "weight_grad_s": 0.001},
            },
            freeze={
                "method": "auto",
                "least_update": 0.05,
                "warm_up": 1,
                "monitoring": MONITORED,
                "ramp": MONITORED,
                "pack": "off",
            },
        )
    )


class ChoosingJob(ControlledJob):
    """A job whose planner solves its program and which chooses, as in its controller."""

    def __init__(self, made: Settled) -> None:
        outline = made.outline
        profile = made_profile(outline.layers, outline.parameters, 1)
        super().__init__(made, JobView(), {}, profile=profile)
        carry_out = self.running.runtime.carry_out

        def accompanied(effect: Effect) -> Work | None:
            if isinstance(effect, Train):
                self.control.accompany(effect.step)
            return carry_out(effect)

        self.running.runtime.carry_out = accompanied

    def _take(self, event: events.Event) -> None:
        super()._take(event)
        if not isinstance(event, events.Submitted):
            self.control.fold(event)


def test_a_job_takes_the_prefix_that_is_predicted_to_come_to_a_loss_sooner(tmp_path: Path) -> None:
    """At first all layers are worth their time; once the head's gradient is most of all, the others are not."""
    made = choosing(tmp_path)
    job = ChoosingJob(made)
    ran = job.run()
    assert isinstance(ran.state, JobFinished)
    solved, prefixed = ran.of(FreezeStarted)
    assert solved.plan.control is None
    (change,) = ran.of(events.FreezeChanged)
    assert (change.method, change.by, change.plan.key) == ("prefix", "auto", prefixed.plan.key)
    assert re.search(r"take 0\.\d\d of the time without freezing, and \d\.\d\d as before$", change.reason)
    control = prefixed.plan.control
    assert control is not None
    assert control.chosen
    assert change.from_step > (solved.plan.start or 0) + EVERY - 1
    (moved,) = ran.of(PrefixFrozen)
    assert (moved.step, moved.layers) == (prefixed.plan.start, control.prefix)
    assert moved.layers > 0

    # Steps that freeze nothing by themselves tell what layers' gradients are; of frozen ones they tell nothing.
    told = {each.step: each.energies for each in ran.of(TimelineReport) if each.energies}
    assert {step for step in told if MONITORED < step < moved.step} == {
        step for step in range(MONITORED + 1, moved.step) if step % 20 == 11
    }
    last = told[max(told)]
    assert [energy > 0.0 for energy in last] == [layer >= moved.layers for layer in range(len(last))]

    # The log's plans alone give the same bits.
    plans = (solved.plan, prefixed.plan)
    again = run_threads(LaunchedJob(made.config, made.plan, made.schedule, freeze_plans=plans))
    assert ran.state_sha256 == again.state_sha256
    assert not [each for each in ran.of(events.Warned) if "freez" in each.text]
