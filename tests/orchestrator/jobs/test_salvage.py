"""A rank that leaves too soon to send all its state: weights go first, and the job may go on with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_rows import assert_consistent
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from rigs import dies_before_its_last_layer, dies_before_its_moments
from tiny_jobs import tiny

from orchestrator.events import types as events
from orchestrator.lifecycle.states import Finished
from orchestrator.lifecycle.stimuli import Asked, Going
from orchestrator.prepare.resolve import Resolved
from workers.checkpoint.folder import (
    checkpoint_folder,
    checkpoints,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint.manifest import Manifest
from workers.launch.ranks import Job, run_threads
from workers.protocol import CheckpointRef, CheckpointReport, Request, StepReport
from workers.state.layer_state import united

SLOW = {
    "device": "emulated",
    "emulated": {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005},
}


def job(folder: Path, cluster: dict[str, Any], every_steps: int = 0, **elastic: Any) -> Resolved:
    """A job of two ranks without copies of each other's layers: a drain fetches them. A test stops it when it has
    seen enough."""
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": 10_000, "sample_tokens": 0},
        "pipeline": {"ranks": 2, "microbatches": 2, "microbatch_size": 1},
        "checkpoint": {"every_steps": every_steps, "keep": 10_000},
        "elastic": {"grow": False, "redundancy": "checkpoint", "migration": "stop", **elastic},
        "cluster": cluster,
    }
    return resolved(tiny(folder, "job", **sections))


@dataclass(frozen=True)
class Drained:
    """A job that one rank left too soon."""

    ran: Ran
    saved: int
    """Step of the only checkpoint."""
    regrouped: events.Regrouped
    end: int
    """Number of committed steps."""


def drained(done: Resolved, rig: Callable[[int], None]) -> Drained:
    """Run a job where rank 1 gets notice once there is a checkpoint and dies while it sends its layers."""
    done_with: set[str] = set()

    def once(what: str) -> bool:
        fresh = what not in done_with
        done_with.add(what)
        return fresh

    def act(running: ElasticJob, event: events.Event) -> None:
        match event:
            case StepReport(step=3) if once("save"):
                running.post(Asked(Request.CHECKPOINT))
            case CheckpointReport() if once("drain"):
                running.post(Going(frozenset({1}), "file", 30.0, "n", "h"))
            case StepReport(generation=2) if once("stop"):
                running.post(Asked(Request.STOP))
            case _:
                pass

    ran = ElasticJob(done, act, rig=rig).run()
    assert isinstance(ran.state, Finished), ran.state
    (failed,) = ran.of(events.RankFailed)
    assert failed.rank == 1
    assert "died: killed" in failed.error
    assert_gone(ran.pids)
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (1,)
    return Drained(ran, ran.of(CheckpointReport)[0].step, regrouped, ran.state.step)


def quiet(folder: Path, end: int) -> tuple[Resolved, str]:
    """An undisturbed run of the job to step `end`, with a checkpoint of each step; and its last state."""
    done = job(folder, {}, every_steps=1)
    return done, run_threads(Job(done.config, done.plan, done.schedule, stop_at=end)).state_sha256


def went_on_with(quiet: Resolved, drained: Drained, layers: set[int], folder: Path) -> str:
    """The last state if a run goes on where the others did, with `layers`' moments from the checkpoint."""
    refs, step, saved = (
        {r.step: r for r in checkpoints(quiet.config.output)},
        drained.regrouped.step,
        drained.saved,
    )
    manifest = read_manifest(refs[step])
    mixed = CheckpointRef(path=checkpoint_folder(str(folder), step, 1), step=step)
    files = {}
    for layer in range(len(manifest.layers)):
        state = read_layer(refs[step], manifest, layer)
        if layer in layers:
            state = united(state, read_layer(refs[saved], read_manifest(refs[saved]), layer))
        files |= {record.name: record for record in write_layer(mixed.path, state)}
    fields = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    write_manifest(mixed.path, Manifest(**{**fields, "files": files}))
    again = Job(quiet.config, quiet.plan, quiet.schedule, start=mixed, generation=2, stop_at=drained.end)
    return run_threads(again).state_sha256


def test_weights_that_were_saved_go_on_with_the_moments_of_the_checkpoint(tmp_path: Path) -> None:
    done = job(tmp_path / "drained", SLOW, salvage="weights")
    drain = drained(done, dies_before_its_moments)
    assert drain.ran.steps == list(range(1, drain.end + 1))
    assert drain.regrouped.steps_lost == 0
    assert drain.regrouped.step > drain.saved
    owned = set(done.plan.layers_of_rank(1))
    assert drain.regrouped.reason.endswith(
        f"only the weights are left of layers {', '.join(map(str, sorted(owned)))}: training continues with the"
        f" moments of the checkpoint of step {drain.saved}, and ends with other bits than without the failure"
        ' (elastic.salvage = "weights")'
    )
    calm, calm_sha256 = quiet(tmp_path / "quiet", drain.end)
    assert drain.ran.state_sha256 == went_on_with(calm, drain, owned, tmp_path / "mixed")
    assert went_on_with(calm, drain, set(), tmp_path / "same") == calm_sha256
    assert drain.ran.state_sha256 != calm_sha256


def test_by_default_all_go_back_to_the_checkpoint_and_keep_their_bits(tmp_path: Path) -> None:
    drain = drained(job(tmp_path / "drained", SLOW), dies_before_its_last_layer)
    assert drain.regrouped.steps_lost > 0
    assert f"back to the checkpoint of step {drain.saved}" in drain.regrouped.reason
    assert len(drain.ran.steps) == drain.end + drain.regrouped.steps_lost
    assert_consistent(drain.ran)
    assert drain.ran.state_sha256 == quiet(tmp_path / "quiet", drain.end)[1]
