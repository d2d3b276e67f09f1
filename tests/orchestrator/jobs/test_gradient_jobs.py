"""A complete job on plain processes whose replicas share out sums of gradients: a lost rank changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from process_hosts import ElasticJob
from test_elastic_jobs import at_step, check, once
from test_shared_jobs import shared

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from workers.launch.ranks import LaunchedJob


def test_a_killed_rank_costs_the_step_in_flight_at_most(tmp_path: Path) -> None:
    """Four ranks in two pipelines; three go on in one, which adds up all replicas' gradients in the same order."""
    done = shared(tmp_path, pipeline={"shard": "gradients"})
    assert (done.plan.shard, done.plan.shards) == ("gradients", 2)
    alone = replace(done.plan, pipelines=1, standbys=())
    quiet = run_threads(LaunchedJob(done.config, alone, done.schedule)).state_sha256
    ran = ElasticJob(done, once(at_step(3), lambda running: running.signal(2))).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.steps_lost) == ("loss", (2,), 0)
    plans = [issued.plan for issued in ran.of(events.Issued)]
    assert {plan.shard for plan in plans} == {"gradients"}
