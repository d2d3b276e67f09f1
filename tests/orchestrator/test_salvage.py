"""A rank that goes too soon to give all that it holds: its weights go first, and the job may go on with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_rows import assert_consistent
from process_hosts import ElasticJob, Ran
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator import events
from orchestrator.resolve import Resolved
from orchestrator.states import Finished
from orchestrator.stimuli import Going
from workers.checkpoint import (
    checkpoint_folder,
    checkpoints,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint_manifest import Manifest
from workers.launch import Job, run_threads
from workers.layer_state import LayerState, united
from workers.protocol import CheckpointRef, CheckpointReport
from workers.transport.state_delivery import Delivery

STEPS, SAVED = 24, 6
"""The drain begins once the checkpoint of step `SAVED` is whole."""


def job(folder: Path, name: str = "job", **elastic: Any) -> Resolved:
    """Two ranks without copies of each other."""
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "sample_tokens": 0},
        "pipeline": {"ranks": 2, "microbatches": 2, "microbatch_size": 1},
        "checkpoint": {"every_steps": SAVED, "keep": 100},
        "elastic": {"grow": False, "redundancy": "checkpoint", **elastic},
    }
    return resolved(tiny(folder, name, **sections))


def dies_when_it_gives(what: Callable[[LayerState], bool]) -> Callable[[int], None]:
    def rig(rank: int) -> None:
        deliver = Delivery.deliver

        def last(self: Delivery, state: LayerState, step: int) -> None:
            if rank == 1 and what(state):
                os.kill(os.getpid(), signal.SIGKILL)
            deliver(self, state, step)

        Delivery.deliver = last

    return rig


def dies_before_its_moments(rank: int) -> None:
    """Rank 1 gives the weights of its layers, and is killed when moments are to follow."""
    dies_when_it_gives(lambda state: not state.weights)(rank)


def dies_before_its_last_layer(rank: int) -> None:
    """Rank 1 is killed when the model's last layer is to leave it."""
    dies_when_it_gives(lambda state: state.layer == 5)(rank)


def drained(done: Resolved, rig: Callable[[int], None]) -> Ran:
    """Rank 1 is told to go, and dies while it gives its layers."""
    told: list[events.Event] = []

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, CheckpointReport) and not told:
            told.append(event)
            running.tell(Going(frozenset({1}), "file", 30.0, "n", "h"))

    ran = ElasticJob(done, act, rig=rig).run()
    assert isinstance(ran.state, Finished), ran.state
    (failed,) = ran.of(events.RankFailed)
    assert failed.rank == 1
    assert "died: killed" in failed.error
    assert not any(psutil.pid_exists(pid) for pid in ran.pids)
    return ran


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Resolved, str]:
    """The job undisturbed, with a checkpoint of every step; and its last state."""
    done = job(tmp_path_factory.mktemp("quiet"))
    config = done.config.model_copy(
        update={"checkpoint": done.config.checkpoint.model_copy(update={"every_steps": 1})}
    )
    return done, run_threads(Job(config, done.plan, done.schedule)).state_sha256


def went_on_with(quiet: Resolved, step: int, layers: set[int], folder: Path) -> str:
    """What becomes of the state of `step` if the moments of `layers` are those of step `SAVED`."""
    refs = {ref.step: ref for ref in checkpoints(quiet.config.output)}
    manifest = read_manifest(refs[step])
    mixed = CheckpointRef(path=checkpoint_folder(str(folder), step, 1), step=step)
    files = {}
    for layer in range(len(manifest.layers)):
        state = read_layer(refs[step], manifest, layer)
        if layer in layers:
            state = united(state, read_layer(refs[SAVED], read_manifest(refs[SAVED]), layer))
        files |= {record.name: record for record in write_layer(mixed.path, state)}
    fields = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    write_manifest(mixed.path, Manifest(**{**fields, "files": files}))
    return run_threads(Job(quiet.config, quiet.plan, quiet.schedule, start=mixed, generation=2)).state_sha256


def test_weights_that_were_saved_go_on_with_the_moments_of_the_checkpoint(
    tmp_path: Path, quiet: tuple[Resolved, str]
) -> None:
    done = job(tmp_path, salvage="weights")
    ran = drained(done, dies_before_its_moments)
    assert ran.steps == list(range(1, STEPS + 1))
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.steps_lost, regrouped.lost) == (0, (1,))
    owned = set(done.plan.layers_of_rank(1))
    listed = ", ".join(map(str, sorted(owned)))
    assert f"only the weights are left of layers {listed}: they go on with the moments of the checkpoint" in (
        regrouped.reason
    )
    assert regrouped.step > SAVED
    assert ran.state_sha256 == went_on_with(quiet[0], regrouped.step, owned, tmp_path / "mixed")
    assert went_on_with(quiet[0], regrouped.step, set(), tmp_path / "same") == quiet[1] != ran.state_sha256


def test_by_default_all_go_back_to_the_checkpoint_and_keep_their_bits(
    tmp_path: Path, quiet: tuple[Resolved, str]
) -> None:
    ran = drained(job(tmp_path), dies_before_its_last_layer)
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.steps_lost > 0
    assert f"back to the checkpoint of step {SAVED}" in regrouped.reason
    assert len(ran.steps) == STEPS + regrouped.steps_lost
    assert_consistent(ran)
    assert ran.state_sha256 == quiet[1]
