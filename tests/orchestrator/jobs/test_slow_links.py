"""Complete jobs on plain processes, of which a link becomes slow: the planner knows it, and the bits stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from adapting_job import AdaptingJob
from made_profile import made_profile
from process_hosts import ElasticJob
from test_elastic_jobs import at_step, job

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FaultReport

STEPS = 16
PASS_S = 0.004
WIDTH, CONTEXT, BATCH = 128, 256, 8
MESSAGE_BYTES = 4 * WIDTH * CONTEXT * BATCH
BYTES_PER_S = 2e7
SENDER = 0


def made(folder: Path, policy: str, pass_s: float = PASS_S) -> Settled:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), pass_s)
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS},
        "model": {"layers": 2, "width": WIDTH, "context": CONTEXT},
        "cluster": {"device": "emulated", "emulated": modelled},
        "elastic": {"allow_faults": True},
        "adapt": {"policy": policy},
        "pipeline": {"ranks": 2, "microbatches": 4, "microbatch_size": BATCH},
    }
    return job(folder, "job", **sections)


def test_a_slow_link_is_known_to_the_planner_and_the_bits_stay(tmp_path: Path) -> None:
    def act(running: ElasticJob, event: events.Event) -> None:
        if at_step(3)(event):
            running.call(SENDER, "arm", Fault(kind=FaultKind.THROTTLE_LINK, bytes_per_s=BYTES_PER_S))

    resolved = made(tmp_path / "slow", "measured")
    outline = resolved.outline
    profile = made_profile(outline.layers, outline.parameters, 2)
    layers = tuple(
        replace(layer, boundary_bytes=MESSAGE_BYTES, boundary_grad_bytes=MESSAGE_BYTES)
        for layer in profile.model.layers
    )
    profile = replace(profile, model=replace(profile.model, layers=layers))
    running = AdaptingJob(resolved, act, profile)
    ran = running.run()
    assert isinstance(ran.state, JobFinished)
    assert ran.steps == list(range(1, STEPS + 1))

    assert ran.of(FaultReport)
    slow = [
        (told.step, one) for told in ran.of(events.LinksTimed) for one in told.links if one.source == SENDER
    ]
    assert slow, "nobody noticed"
    rates = [one.bytes_per_s for _, one in slow]
    # Told again as it changes: a busy machine delays and bunches single messages.
    assert median(rates) == pytest.approx(BYTES_PER_S, rel=0.2)
    assert running.view.adapt.links == ran.of(events.LinksTimed)[-1].links

    done = made(tmp_path / "quiet", "off", pass_s=0.0)
    assert ran.state_sha256 == run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256
