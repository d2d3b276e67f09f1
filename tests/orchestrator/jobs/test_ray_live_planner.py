"""A job on a real Ray cluster adapts, whichever process its planner lives in.

For `make bench`: in `make test`, `test_ray_planner.py` kills planners of another job, `test_speeds.py` has a planner
that takes another one's place, and `rehearsal/test_interference.py` a job of plain processes that adapts.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from ray_jobs import Log, assert_nothing_left, state_sha256
from tiny_jobs import tiny

from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.fault_injection.drill import Drill
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.reports import FaultReport, StepReport

pytestmark = pytest.mark.soak

STEPS = 40
SLOW_FROM, FACTOR = 12, 4.0


@pytest.fixture(autouse=True)
def nothing_left(two_nodes: None) -> Iterator[None]:
    yield
    assert_nothing_left()


def job(folder: Path, name: str, policy: str = "measured") -> Spec:
    pass_s = 0.004
    return tiny(
        folder,
        name,
        job={"steps": STEPS, "sample_tokens": 0},
        model={"layers": 8},
        pipeline={"ranks": 2, "microbatches": 4},
        cluster={
            "device": "emulated",
            "emulated": {"forward_s": pass_s, "input_grad_s": pass_s, "weight_grad_s": pass_s},
        },
        elastic={"allow_faults": True},
        adapt={"policy": policy},
    )


def test_a_planner_that_is_killed_is_replaced_by_one_that_knows_the_ranks(tmp_path: Path) -> None:
    expected = state_sha256(job(tmp_path / "plain", "plain", "off"))
    killed: list[int] = []

    def see(record: events.Record) -> None:
        started = [each for each in log.of(events.PlannerStarted) if each.of == "speeds"]
        if isinstance(record.event, events.SpeedsChanged) and not killed:
            killed.append(started[-1].pid)
            os.kill(killed[-1], signal.SIGKILL)
        if isinstance(record.event, StepReport) and record.event.step == SLOW_FROM:
            assert killed, "the speeds are known by then"
            drill = Drill.from_json({"rank": 1, "fault": Fault(kind=FaultKind.SLOW, factor=FACTOR).to_json()})
            BlockingJobClient().fault("adapting", drill.to_json())

    log = Log(see)
    result = PipelineTrainer(job(tmp_path, "adapting"), observe=log).fit()
    assert result.error is None
    lives = [(each.life, each.of) for each in log.of(events.PlannerStarted)]
    assert lives == [(1, "speeds"), (2, "speeds")]
    assert not psutil.pid_exists(killed[0])
    (warned,) = [event.text for event in log.of(events.Warned) if "planner" in event.text]
    assert warned.endswith("killed, out of memory, or its node is gone; another one takes its place")
    (fault,) = log.of(FaultReport)
    # The second planner had no first level to find: it tells a change.
    said = log.of(events.SpeedsChanged)
    # A busy machine may slow ranks down before the fault, so that the change begins a step early, and keep the first
    # measurements after it from the planner.
    (before, told, since), *_ = [
        (before, event, int(since))
        for before, event in pairwise(said)
        if log.events.index(event) > log.events.index(fault)
        for change in event.changes
        for since, level in re.findall(r"^rank 1 is .* times slower since step (\d+) .*-> ([\d.]+)", change)
        if float(level) > FACTOR / 2
    ]
    assert before.past is not None
    assert told.past is not None
    # The first planner saw the speed begin that the second one saw end.
    lasted = since - dict(before.past.changed)[1]
    assert lasted in [steps for steps, _ in told.past.fast_steps + told.past.slow_steps]
    moved = [event for event in log.of(events.Migrated) if event.step >= fault.step]
    assert moved
    assert log.of(events.Issued)[-1].plan.layers_per_stage[1] < 4
    (finished,) = log.of(events.Finished)
    assert finished.state_sha256 == expected
    log.assert_processes_gone()
