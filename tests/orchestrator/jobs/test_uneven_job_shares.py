"""A job whose pipelines get uneven shares while it trains, and lose a rank then: the bits of an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_hosts import ElasticJob
from test_elastic_jobs import both, job, once

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.requests.move_request import described, move_to
from orchestrator.events import types as events
from orchestrator.lifecycle.states import Training
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from planner.wording import shares_text
from workers.launch.ranks import LaunchedJob, LaunchedRun
from workers.protocol.reports import StepReport, SwitchReport

STEPS = 16


def two_pipelines(folder: Path, shard: str = "none") -> Settled:
    pipeline = {"ranks": 4, "replicas": 2, "microbatches": 4, "shard": shard}
    return job(folder, job={"steps": STEPS}, pipeline=pipeline)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    done = two_pipelines(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule))


def sharing(step: int, shares: tuple[int, ...], told: list[str]) -> Callable[..., None]:
    """Request these shares at `step`."""

    def act(running: ElasticJob) -> None:
        state = running.loop.state
        assert isinstance(state, Training)
        now = state.job.progress.plan
        move = move_to(
            state.job,
            running.setup.replanner,
            replace(now, shares=shares),
            mode="live",
            asked_s=time.time(),
        )
        told.append(described(state.job, move))
        running.post(Migrate(move))

    return once(lambda event: isinstance(event, StepReport) and event.step == step, act)


def digests(log: list[Any]) -> dict[int, str]:
    return {report.step: report.samples_digest for report in log if isinstance(report, StepReport)}


@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.soak), "optimizer"])
def test_shares_change_and_change_back(tmp_path: Path, quiet: LaunchedRun, shard: str) -> None:
    told: list[str] = []
    ran = ElasticJob(
        two_pipelines(tmp_path, shard), both(sharing(2, (6, 2), told), sharing(7, (), told))
    ).run()
    check_bits(ran, quiet)
    moves = ran.of(events.Migrated)
    assert [(move.layers, move.shares, move.bytes) for move in moves] == [((), (6, 2), 0), ((), (), 0)]
    assert len(ran.of(SwitchReport)) == 8
    assert [issued.plan.shares for issued in ran.of(events.Issued)] == [(), (6, 2), ()]
    assert told == [
        f"a step with {shares_text(shares)}, live: from a commit on, and nothing is sent"
        for shares in ((6, 2), ())
    ]
    assert not ran.of(events.Regrouped)


def test_a_rank_that_is_lost_amid_uneven_shares_costs_the_step_in_flight_at_most(
    tmp_path: Path, quiet: LaunchedRun
) -> None:
    def followed(event: events.Event) -> bool:
        return isinstance(event, events.Migrated)

    ran = ElasticJob(
        two_pipelines(tmp_path),
        both(sharing(2, (6, 2), []), once(followed, lambda running: running.signal(3))),
    ).run()
    check_bits(ran, quiet)
    assert [move.shares for move in ran.of(events.Migrated)] == [(6, 2)]
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.step >= ran.of(events.Migrated)[0].step
    after = ran.of(events.Formed)[-1]
    assert len(after.generation.members) < 4


def check_bits(ran: Any, quiet: LaunchedRun) -> None:
    assert ran.state_sha256 == quiet.state_sha256
    assert ran.steps == list(range(1, STEPS + 1))
    assert digests(ran.log) == digests(quiet.reports)
