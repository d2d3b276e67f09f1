"""A rank that leaves too soon to send all its state: weights go first, and the job may go on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_rows import assert_consistent
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from rigs import all_gather_or_none, dies_before_its_last_layer, dies_before_its_moments
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.lifecycle.stimuli import Going, SaveOrStop
from orchestrator.prepare.settling import Settled
from planner.shards import Piece, Shard
from workers.build import build_layers
from workers.checkpoint.folder import (
    checkpoint_folder,
    checkpoints,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint.manifest import Manifest
from workers.data.registry import open_dataset
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.models.registry import build_definition
from workers.protocol.orders import CheckpointRef, Request
from workers.protocol.reports import CheckpointReport, FaultReport, StepReport
from workers.state.layer_state import LayerState
from workers.state.optim import make_optimizer

SLOW = {
    "device": "emulated",
    "emulated": {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005},
}


def job(
    folder: Path,
    cluster: dict[str, Any],
    every_steps: int = 0,
    shard: str = "none",
    precision: str = "float32",
    **elastic: Any,
) -> Settled:
    """A job of two ranks without copies of each other's layers: a drain fetches them. A test stops it when it has
    seen enough.

    Args:
        shard: what the ranks share out, in two pipelines of one stage; `none`: they are two stages of one pipeline.
    """
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": 10_000, "sample_tokens": 0, "precision": precision},
        "pipeline": {
            "ranks": 2,
            "microbatches": 2,
            "microbatch_size": 1,
            "replicas": 1 if shard == "none" else 2,
            "shard": shard,
        },
        "checkpoint": {"every_steps": every_steps, "keep": 10_000},
        "elastic": {"grow": False, "redundancy": "checkpoint", "migration": "stop", **elastic},
        "cluster": cluster,
    }
    return resolved(tiny(folder, "job", **sections))


@dataclass(frozen=True)
class Drained:
    """A job that one rank left too soon, or in a step."""

    ran: Ran
    saved: int
    """Step of the only checkpoint."""
    regrouped: events.Regrouped
    end: int
    """Number of committed steps."""


GOING = Going(frozenset({1}), "file", 30.0, "n", "h")


def drained(done: Settled, rig: Callable[[int], None], room: int | None = None) -> Drained:
    """Run a job where rank 1 gets notice once there is a checkpoint and dies while it sends its layers."""
    return lost(done, lambda running: running.post(GOING), rig=rig, room=room)


def killed(done: Settled, phase: FaultPhase, room: int | None = None) -> Drained:
    """Run a job where rank 1 is killed in a phase of a step, once there is a checkpoint."""
    kill = Fault(kind=FaultKind.KILL, phase=phase)
    found = lost(done, lambda running: running.call(1, "arm", kill), rig=all_gather_or_none, room=room)
    (fired,) = found.ran.of(FaultReport)
    assert (fired.rank, fired.fault, fired.phase) == (1, "kill", phase)
    return found


def lost(done: Settled, lose: Callable[[ElasticJob], None], **hosts: Any) -> Drained:
    """Run a job that loses rank 1 once there is a checkpoint."""
    done_with: set[str] = set()

    def once(what: str) -> bool:
        fresh = what not in done_with
        done_with.add(what)
        return fresh

    def act(running: ElasticJob, event: events.Event) -> None:
        match event:
            case StepReport(step=3) if once("save"):
                running.post(SaveOrStop(Request.CHECKPOINT))
            case CheckpointReport() if once("drain"):
                lose(running)
            case StepReport(generation=2) if once("stop"):
                running.post(SaveOrStop(Request.STOP))
            case _:
                pass

    ran = ElasticJob(done, act, **hosts).run()
    assert isinstance(ran.state, JobFinished), ran.state
    (failed,) = ran.of(events.RankFailed)
    assert failed.rank == 1
    assert "died: killed" in failed.error
    assert_gone(ran.pids)
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (1,)
    return Drained(ran, ran.of(CheckpointReport)[0].step, regrouped, ran.state.step)


def quiet(folder: Path, end: int, **changes: Any) -> tuple[Settled, str]:
    """An undisturbed run of the job to step `end`, with a checkpoint of each step; and its last state."""
    done = job(folder, {}, every_steps=1, **changes)
    return done, run_threads(LaunchedJob(done.config, done.plan, done.schedule, stop_at=end)).state_sha256


def parameters_of(done: Settled, layer: int, shard: Shard) -> set[str]:
    """The trained parameters of a layer's shard."""
    config = done.config
    definition = build_definition(
        config.model, open_dataset(config.data, config.model, config.job.folder).vocabulary
    )
    built = build_layers(
        definition,
        [layer],
        seed=config.job.seed,
        precision=config.job.precision,
        device=torch.device("cpu"),
        optimizer=make_optimizer(config.optimizer, config.job.steps),
        shard=shard,
    )
    return {*built[layer][1].updates}


def with_moments(state: LayerState, old: LayerState, names: set[str]) -> LayerState:
    """`state` with the moments that `old` has for these parameters."""
    return replace(
        state,
        slots={name: (old if name in names else state).slots[name] for name in state.slots},
        updates={name: (old if name in names else state).updates[name] for name in state.updates},
    )


def went_on_with(quiet: Settled, drained: Drained, pieces: Iterable[Piece], folder: Path) -> str:
    """The last state if a run goes on where the others did, with the moments of `pieces` from the checkpoint."""
    shards = {piece.layer: piece.shard for piece in pieces}
    refs, step, saved = (
        {r.step: r for r in checkpoints(quiet.config.job.folder)},
        drained.regrouped.step,
        drained.saved,
    )
    manifest = read_manifest(refs[step])
    mixed = CheckpointRef(path=checkpoint_folder(str(folder), step, 1), step=step)
    files = {}
    for layer in range(len(manifest.layers)):
        state = read_layer(refs[step], manifest, layer)
        if layer in shards:
            old = read_layer(refs[saved], read_manifest(refs[saved]), layer)
            state = with_moments(state, old, parameters_of(quiet, layer, shards[layer]))
        files |= {record.name: record for record in write_layer(mixed.path, state)}
    fields = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    write_manifest(mixed.path, Manifest(**{**fields, "files": files}))
    again = LaunchedJob(
        quiet.config, quiet.plan, quiet.schedule, start=mixed, generation=2, stop_at=drained.end
    )
    return run_threads(again).state_sha256


def test_weights_that_were_saved_go_on_with_the_moments_of_the_checkpoint(tmp_path: Path) -> None:
    done = job(tmp_path / "drained", SLOW, salvage="weights")
    drain = drained(done, dies_before_its_moments)
    assert drain.ran.steps == list(range(1, drain.end + 1))
    assert drain.regrouped.steps_lost == 0
    assert drain.regrouped.step > drain.saved
    owned = done.plan.layers_of_rank(1)
    assert drain.regrouped.reason.endswith(
        f"only the weights are left of layers {', '.join(map(str, owned))}: training continues with the"
        f" moments of the checkpoint of step {drain.saved}, and ends with other bits than without the failure"
        ' (elastic.salvage = "weights")'
    )
    calm, calm_sha256 = quiet(tmp_path / "quiet", drain.end)
    assert drain.ran.state_sha256 == went_on_with(calm, drain, map(Piece, owned), tmp_path / "mixed")
    assert went_on_with(calm, drain, (), tmp_path / "same") == calm_sha256
    assert drain.ran.state_sha256 != calm_sha256


@pytest.mark.parametrize(
    ("shard", "precision", "spares"),
    [
        pytest.param("optimizer", "float32", 0, marks=pytest.mark.soak),
        ("optimizer", "bfloat16", 1),
        ("gradients", "bfloat16", 0),
    ],
)
def test_shards_of_which_only_weights_came_go_on_with_the_moments_of_the_checkpoint(
    tmp_path: Path, shard: str, precision: str, spares: int
) -> None:
    """The other rank goes on alone, with whole layers, or a spare takes the lost one's place and shards."""
    shared: dict[str, Any] = {"shard": shard, "precision": precision}
    done = job(tmp_path / "drained", SLOW, salvage="weights", spares=spares, **shared)
    went = drained(done, dies_before_its_moments, room=2 + spares)
    assert went.regrouped.rerun == 0, "no step was in flight"
    check_salvaged(done, went, tmp_path, **shared)
    assert went.ran.of(events.Issued)[-1].plan.shards == 1 + spares


def test_what_siblings_computed_with_is_left_of_a_killed_rank(tmp_path: Path) -> None:
    """A spare takes its place."""
    shared: dict[str, Any] = {"shard": "optimizer"}
    done = job(tmp_path / "killed", SLOW, salvage="weights", spares=1, allow_faults=True, **shared)
    went = killed(done, FaultPhase.BEFORE_COMMIT, room=3)
    assert (went.regrouped.cause, went.regrouped.rerun) == ("loss", 1)
    check_salvaged(done, went, tmp_path, **shared)


@pytest.mark.parametrize(
    ("precision", "phase"), [("bfloat16", FaultPhase.BEFORE_COMMIT), ("float32", FaultPhase.AFTER_COMMIT)]
)
def test_what_siblings_computed_with_counts_only_if_it_is_the_newest_in_32_bits(
    tmp_path: Path, precision: str, phase: FaultPhase
) -> None:
    """After an update, each sibling has the newest weights of its own shards alone."""
    shared: dict[str, Any] = {"shard": "optimizer", "precision": precision}
    done = job(tmp_path / "killed", SLOW, salvage="weights", allow_faults=True, **shared)
    went = killed(done, phase)
    assert went.regrouped.steps_lost > 0
    assert f"back to the checkpoint of step {went.saved}" in went.regrouped.reason
    assert went.ran.state_sha256 == quiet(tmp_path / "quiet", went.end, **shared)[1]


def check_salvaged(done: Settled, went: Drained, folder: Path, **shared: Any) -> None:
    """Check that no step is lost, that all shards of rank 1 and no others have the moments of the checkpoint, and that
    all weights are those of the newest step."""
    assert went.ran.steps == list(range(1, went.end + 1))
    assert went.regrouped.steps_lost == 0
    assert went.regrouped.step > went.saved
    pieces = done.plan.pieces_of_place(1)
    assert {piece.shard for piece in pieces} == {Shard(1, 2)}
    assert (
        f"only the weights are left of shards of layers {', '.join(str(piece.layer) for piece in pieces)}: training"
        f" continues with the moments of the checkpoint of step {went.saved}" in went.regrouped.reason
    )
    calm, calm_sha256 = quiet(folder / "quiet", went.end, **shared)
    assert went.ran.state_sha256 == went_on_with(calm, went, pieces, folder / "mixed")
    assert went.ran.state_sha256 != calm_sha256


def test_by_default_all_go_back_to_the_checkpoint_and_keep_their_bits(tmp_path: Path) -> None:
    drain = drained(job(tmp_path / "drained", SLOW), dies_before_its_last_layer)
    assert drain.regrouped.steps_lost > 0
    assert f"back to the checkpoint of step {drain.saved}" in drain.regrouped.reason
    assert len(drain.ran.steps) == drain.end + drain.regrouped.steps_lost
    assert_consistent(drain.ran)
    assert drain.ran.state_sha256 == quiet(tmp_path / "quiet", drain.end)[1]
