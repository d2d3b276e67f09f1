"""Complete jobs on plain processes, of which a link becomes slow: the planner knows it, and the bits stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from adapting_job import AdaptingJob
from made_profile import made_profile
from process_hosts import ElasticJob
from test_elastic_jobs import at_step, job

from orchestrator.events import types as events
from orchestrator.lifecycle.states import Finished
from orchestrator.prepare.resolve import Resolved
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.ranks import Job, run_threads
from workers.protocol import FaultReport

STEPS = 20
PASS_S = 0.01
WIDTH, CONTEXT, BATCH = 128, 256, 8
MESSAGE_BYTES = 4 * WIDTH * CONTEXT * BATCH
SLOW_AT, SLOW_STEPS = 5, 6
BYTES_PER_S = 2e7
SENDER = 1


def made(folder: Path, policy: str, pass_s: float = PASS_S) -> Resolved:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), pass_s)
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS},
        "model": {"layers": 4, "width": WIDTH, "context": CONTEXT},
        "cluster": {"device": "emulated", "emulated": modelled},
        "elastic": {"allow_faults": True},
        "adapt": {"policy": policy},
        "pipeline": {"ranks": 3, "microbatches": 4, "microbatch_size": BATCH},
    }
    return job(folder, **sections)


def test_a_link_that_becomes_slow_is_known_within_a_few_steps_and_later_forgotten(tmp_path: Path) -> None:
    def act(running: ElasticJob, event: events.Event) -> None:
        if at_step(SLOW_AT)(event):
            fault = Fault(kind=FaultKind.THROTTLE_LINK, bytes_per_s=BYTES_PER_S, steps=SLOW_STEPS)
            running.call(SENDER, "arm", fault)

    resolved = made(tmp_path / "slow", "measured")
    outline = resolved.outline
    profile = made_profile(outline.layers, outline.parameters, 3)
    layers = tuple(
        replace(layer, boundary_bytes=MESSAGE_BYTES, boundary_grad_bytes=MESSAGE_BYTES)
        for layer in profile.model.layers
    )
    profile = replace(profile, model=replace(profile.model, layers=layers))
    ran = AdaptingJob(resolved, act, profile).run()
    for e in ran.of(events.LinksTimed): print(e)
    for e in ran.of(events.Adapted): print(e)
    for e in ran.of(events.Warned): print(e)
    print([r.step_s for r in ran.reports] if hasattr(ran,"reports") else "")
    assert isinstance(ran.state, Finished)
    assert ran.steps == list(range(1, STEPS + 1))
    assert 0
