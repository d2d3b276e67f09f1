"""The text that the driver prints for each event."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from orchestrator.cli.text.progress import LineProgress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.events import types as events
from planner.freezing import FreezePlan
from workers.protocol.orders import Generation


def said(*happened: events.Event) -> str:
    console = Console(file=StringIO(), width=200)
    observe = TrainingLines(LineProgress(console, 100))
    for event in happened:
        observe(events.Record(time_s=0.0, event=event))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("model", "beginning"),
    [({}, "from initial weights"), ({"weights": "/w.safetensors"}, "from the weights in /w.safetensors")],
)
def test_the_first_generation_says_where_its_weights_come_from(model: dict[str, Any], beginning: str) -> None:
    generation = Generation(number=1, epoch=1, members=(0,), store_host="h", store_port=1, timeout_s=1.0)
    submitted = events.Submitted(job="a", epoch=1, spec={"model": model}, resume=False)
    formed = events.Formed(generation=generation, start=None, step=0)
    assert said(submitted, formed) == f"training: 1 rank on 0 hosts, {beginning}\n"


def test_it_says_which_ranks_the_job_waits_for() -> None:
    assert said(events.Placing(ranks=(4,))) == "starting 1 rank\n"


def test_a_solved_freeze_program_says_what_a_step_will_compute() -> None:
    solved = events.FreezeSolved(
        plan=FreezePlan(epoch=1, version=1, ratios=((0.5,),)),
        ratios=((0, 0, 0.5),),
        unfrozen_s=0.294,
        solved_s=0.257,
        all_frozen_s=0.2,
        outside_s=0.0,
        measured_unfrozen_s=0.3,
        measured_all_frozen_s=0.2,
        kappa=0.87,
        mean_per_stage=(0.5,),
        duals=(0.0,),
        critical=(),
        solve_s=0.01,
    )
    line = "freezing: expected compute per step: 294 ms -> 257 ms (200 ms with everything frozen)\n"
    assert said(solved) == line
