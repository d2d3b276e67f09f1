"""A rank dies while it sends a large message, as most are in real jobs: no rank waits for the rest."""

from __future__ import annotations

from pathlib import Path

from process_hosts import ElasticJob, assert_gone
from ray_jobs import resolved
from rigs import dies_sending
from tiny_jobs import write_text

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import DataConfig, ElasticConfig, ModelConfig
from workers.launch.ranks import LaunchedJob

SAMPLES = 2
"""Samples of a microbatch, whose message has 16 MB."""
STEPS = 4
TIMEOUT_S = 60.0


def job(folder: Path) -> Settled:
    return resolved(
        Spec(
            job=JobConfig(name="wide", steps=STEPS, sample_tokens=0, output=str(folder / "wide")),
            model=ModelConfig(factory="wide_model:model", context=4),
            data=DataConfig(source="text", path=str(write_text(folder))),
            pipeline=PipelineConfig(ranks=3, microbatches=2, microbatch_size=SAMPLES),
            elastic=ElasticConfig(redundancy="peer", grow=False),
            cluster=ClusterConfig(address="auto", device="cpu"),
        )
    )


def test_survivors_go_on_at_once(tmp_path: Path) -> None:
    torn = job(tmp_path)
    calm = run_threads(LaunchedJob(torn.config, torn.plan, torn.schedule))
    ran = ElasticJob(torn, rig=dies_sending, timeout_s=TIMEOUT_S).run()
    assert isinstance(ran.state, JobFinished), ran.state
    failed = ran.of(events.RankFailed)
    assert [each.rank for each in failed] == [1], failed
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (1,)
    assert regrouped.detect_s < TIMEOUT_S / 4
    assert ran.steps == list(range(1, STEPS + 1))
    assert ran.state_sha256 == calm.state_sha256
    assert_gone(ran.pids)
