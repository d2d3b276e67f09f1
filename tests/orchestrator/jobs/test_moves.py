"""Layers that move between ranks of complete jobs on plain processes, with the bits of an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_hosts import ElasticJob, Ran
from test_elastic_jobs import job

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.requests.move_request import move_of_layers
from orchestrator.events import types as events
from orchestrator.lifecycle.migration import Mode
from orchestrator.lifecycle.states import JobFinished, Training
from orchestrator.lifecycle.stimuli import Migrate
from orchestrator.prepare.settling import Settled
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import StepReport, SwitchReport

STEPS = 24
LONG_STEPS: dict[str, dict[str, Any]] = {
    "pipeline": {"microbatches": 2},
    "cluster": {"emulated": dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 0.004)},
}
"""Few microbatches that take long: a move takes some steps, and the steps little of a processor."""
MODEL = {"layers": 8}


def long_job(folder: Path, **sections: dict[str, Any]) -> Settled:
    """A job of four ranks and ten layers."""
    given: dict[str, dict[str, Any]] = {"job": {"steps": STEPS}, "model": MODEL, **LONG_STEPS, **sections}
    return job(folder, "job", **given)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = long_job(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def moving(layers: tuple[int, int], rank: int, mode: Mode = "live", step: int = 3) -> Callable[..., None]:
    """Request a move at `step`."""
    asked: list[int] = []

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == step and not asked:
            asked.append(event.step)
            state = running.loop.state
            assert isinstance(state, Training)
            move = move_of_layers(
                state.job, running.setup.replanner, layers, rank, mode=mode, asked_s=time.time()
            )
            running.post(Migrate(move))

    return act


def check(ran: Ran, expected: str | None) -> None:
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.steps == list(range(1, STEPS + 1))
    if expected is not None:
        assert ran.state_sha256 == expected


@pytest.mark.parametrize(
    ("layers", "rank", "source", "copied"),
    [
        pytest.param((3, 5), 2, 1, True, marks=pytest.mark.soak),
        ((5, 7), 1, 2, True),
        ((2, 3), 0, 1, False),
    ],
)
def test_layers_move_while_the_job_trains(
    tmp_path: Path, quiet: str, layers: tuple[int, int], rank: int, source: int, copied: bool
) -> None:
    done = long_job(tmp_path)
    assert done.plan.layers == ((0, 2), (2, 5), (5, 8), (8, 10))
    assert (rank in done.plan.standbys[layers[0]] and rank in done.plan.standbys[layers[1] - 1]) != copied
    ran = ElasticJob(done, moving(layers, rank)).run()
    check(ran, quiet)
    assert ran.of(events.Warned) == []
    (migrated,) = ran.of(events.Migrated)
    count = layers[1] - layers[0]
    assert migrated.layers == tuple(range(*layers))
    assert (migrated.mode, migrated.source, migrated.target) == ("live", (source,) * count, (rank,) * count)
    assert bool(migrated.bytes) == copied
    assert len(ran.of(events.Formed)) == 1
    issued = [event.plan for event in ran.of(events.Issued)]
    switches = ran.of(SwitchReport)
    assert {(s.version, s.rank) for s in switches} == {(p.version, r) for p in issued[1:] for r in range(4)}
    assert [(s.rank, s.taken) for s in switches if s.taken] == [(rank, migrated.layers)]
    assert [(s.rank, s.given) for s in switches if s.given] == [(source, migrated.layers)]
    # The source keeps copies of the layers until the copies that the plan wants are current.
    (taking,) = (plan for plan in issued if plan.version == migrated.version)
    assert all(source in taking.standbys[layer] for layer in migrated.layers)
    assert all(len(places) == 1 for places in issued[-1].standbys)


@pytest.mark.parametrize("mode", [pytest.param("stop", marks=pytest.mark.soak), "deferred"])
def test_the_other_ways_to_move(tmp_path: Path, quiet: str, mode: Mode) -> None:
    ran = ElasticJob(long_job(tmp_path), moving((3, 5), 2, mode)).run()
    check(ran, quiet if mode == "stop" else None)
    (migrated,) = ran.of(events.Migrated)
    assert (migrated.mode, migrated.layers, migrated.target) == (mode, (3, 4), (2, 2))
    issued = [event.plan for event in ran.of(events.Issued)]
    assert issued[-1].layers == ((0, 2), (2, 3), (3, 8), (8, 10))
    if mode == "stop":
        (regrouped,) = ran.of(events.Regrouped)
        assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("move", (), 0)
        assert migrated.bytes is None
        # The move began with the newest step known when it was requested: the third or a later one.
        assert 0 <= migrated.steps <= regrouped.step - 3
        assert len(ran.of(events.Formed)) == 2
        assert not ran.of(events.Warned)
    else:
        (warned,) = ran.of(events.Warned)
        assert warned.text.startswith("updates of layer 3 are held while they move")
        assert migrated.bytes
        assert len(ran.of(events.Formed)) == 1
