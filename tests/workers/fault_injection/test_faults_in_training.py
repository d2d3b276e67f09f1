"""Faults in engine processes that train: each does what it says and changes no bit of anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drilled_ranks import Drilled, drill
from jobs import job, small_config

from benchmarks.parts.rank_threads import run_threads
from planner.ir import ActionKind
from planner.schedule.expand import schedule_of
from workers.checkpoint.folder import DamagedCheckpointError, checkpoints, read_layer, read_manifest
from workers.config import CheckpointConfig, ElasticConfig, EmulatedConfig, FreezeConfig
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import CheckpointReport, StepReport, TimelineReport, WarningReport

STEPS = 5
FORWARD_S = 0.004


def three_ranks(output: Path, **changes: Any) -> LaunchedJob:
    """A job of 8 layers on three ranks that allows faults."""
    settings: dict[str, Any] = {
        "steps": STEPS,
        "device": "emulated",
        "emulated": EmulatedConfig(forward_s=FORWARD_S, input_grad_s=FORWARD_S, weight_grad_s=FORWARD_S),
        "elastic": ElasticConfig(allow_faults=True, redundancy="none"),
        "timeline_every": 1,
    }
    return job(small_config(output, **{**settings, **changes}), ranks=3, schedule="1f1b")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends when no fault fires."""
    return run_threads(three_ranks(tmp_path_factory.mktemp("quiet"))).state_sha256


def steps(done: Drilled) -> list[int]:
    return [report.step for report in done.of(StepReport)]


def busy_s(done: Drilled, rank: int, step: int) -> float:
    (timeline,) = [t for t in done.of(TimelineReport) if (t.rank, t.step) == (rank, step)]
    return sum(span.end_s - span.start_s for span in timeline.spans)


@pytest.mark.parametrize(
    ("rank", "phase"), [(0, FaultPhase.FORWARD), (1, FaultPhase.BACKWARD), (2, FaultPhase.BEFORE_COMMIT)]
)
def test_a_kill_ends_one_process_and_the_others_know_at_once(
    tmp_path: Path, rank: int, phase: FaultPhase
) -> None:
    done = drill(three_ranks(tmp_path), {rank: (Fault(kind=FaultKind.KILL, step=3, phase=phase),)})
    assert done.fired == [(rank, "kill", 3, phase)]
    assert done.errors[rank] == "died"
    others = {number: text for number, text in done.errors.items() if number != rank}
    assert sorted(others) == sorted({0, 1, 2} - {rank})
    assert all(text.startswith("ChannelError") for text in others.values())
    assert not done.outcomes


def test_a_stopped_rank_goes_on_and_nothing_is_lost(tmp_path: Path, quiet: str) -> None:
    fault = Fault(kind=FaultKind.STOP, step=2, phase=FaultPhase.BACKWARD, seconds=0.5)
    done = drill(three_ranks(tmp_path), {1: (fault,)})
    assert done.fired == [(1, "stop for 0.5 s", 2, "backward")]
    assert not done.errors
    assert steps(done) == [1, 2, 3, 4, 5]
    assert done.state_sha256 == quiet


def test_a_slow_rank_is_slow_for_its_steps_and_computes_the_same(tmp_path: Path, quiet: str) -> None:
    fault = Fault(kind=FaultKind.SLOW, step=2, factor=4, steps=2)
    done = drill(three_ranks(tmp_path), {1: (fault,)})
    assert done.fired == [(1, "slow 4 times for 2 steps", 2, "forward")]
    layers, microbatches, parts = len(three_ranks(tmp_path).plan.layers_of_rank(1)), 4, 3
    modelled_s = layers * microbatches * parts * FORWARD_S
    for step in (2, 3):
        assert busy_s(done, 1, step) > 3.99 * modelled_s
    assert steps(done) == [1, 2, 3, 4, 5]
    assert done.state_sha256 == quiet


def test_a_throttled_link_delays_and_delivers_the_same(tmp_path: Path, quiet: str) -> None:
    fault = Fault(kind=FaultKind.THROTTLE_LINK, step=2, bytes_per_s=20_000, steps=1)
    done = drill(three_ranks(tmp_path), {0: (fault,)})
    assert done.fired == [(0, "throttle-link to 20000 bytes/s for 1 step", 2, "forward")]
    assert not done.errors
    assert done.state_sha256 == quiet


def test_a_severed_rank_lives_and_all_know(tmp_path: Path) -> None:
    fault = Fault(kind=FaultKind.DROP_LINK, step=2, phase=FaultPhase.BACKWARD)
    done = drill(three_ranks(tmp_path), {1: (fault,)})
    assert done.fired == [(1, "drop-link", 2, "backward")]
    assert sorted(done.errors) == [0, 1, 2]
    assert all(text.startswith("ChannelError") for text in done.errors.values())


@pytest.mark.parametrize("phase", [FaultPhase.FORWARD, FaultPhase.AFTER_COMMIT])
def test_a_rank_that_raises_says_so_and_the_others_lose_it(tmp_path: Path, phase: FaultPhase) -> None:
    done = drill(three_ranks(tmp_path), {1: (Fault(kind=FaultKind.RAISE, step=2, phase=phase),)})
    assert done.fired == [(1, "raise", 2, phase)]
    assert done.errors[1] == f"DrillError: a drill raised this in phase {phase} of step 2"
    assert all(done.errors[rank].startswith("ChannelError") for rank in (0, 2))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_nan_in_one_ranks_gradient_skips_the_step_everywhere(tmp_path: Path, quiet: str, rank: int) -> None:
    done = drill(three_ranks(tmp_path), {rank: (Fault(kind=FaultKind.NAN, step=3),)})
    assert done.fired == [(rank, "nan", 3, "backward")]
    assert not done.errors
    assert [report.step for report in done.of(StepReport) if report.skipped] == [3]
    assert steps(done) == [1, 2, 3, 4, 5]
    assert done.state_sha256 != quiet


FROZEN = {"freeze": FreezeConfig(method="prefix", prefix=4)}
"""All layers of the first rank."""


@pytest.mark.parametrize("backward", ["kept", "dropped"])
def test_a_rank_whose_layers_are_all_frozen_has_a_backward_phase(tmp_path: Path, backward: str) -> None:
    work = three_ranks(tmp_path, **FROZEN)
    if backward == "dropped":
        plan = replace(work.plan, frozen=4)
        work = replace(work, plan=plan, schedule=schedule_of(plan))
        assert not [one for one in work.schedule.programs[0] if one.kind is not ActionKind.FORWARD]
    quiet = run_threads(work).state_sha256
    stop = Fault(kind=FaultKind.STOP, step=2, phase=FaultPhase.BACKWARD, seconds=0.2)
    done = drill(work, {0: (stop, Fault(kind=FaultKind.NAN, step=3))})
    assert done.fired == [(0, "stop for 0.2 s", 2, "backward")]
    (warning,) = [said.text for said in done.of(WarningReport)]
    assert warning == (
        "drill: nan did nothing: no gradient is formed here in step 3: choose a rank whose layers are trained"
    )
    assert not done.errors
    assert done.state_sha256 == quiet


def test_a_blind_rank_takes_the_commit_for_lost_and_others_have_it(tmp_path: Path) -> None:
    done = drill(three_ranks(tmp_path), {2: (Fault(kind=FaultKind.BLIND, step=3),)})
    assert done.fired == [(2, "blind", 3, "in-commit")]
    assert done.errors[2] == "ChannelError: a drill lost the records of commit 3"
    assert all(done.errors[rank].startswith("ChannelError") for rank in (0, 1))


def test_a_full_disk_costs_a_checkpoint_and_no_step(tmp_path: Path, quiet: str) -> None:
    done = drill(
        three_ranks(tmp_path, checkpoint=CheckpointConfig(every_steps=2)),
        {1: (Fault(kind=FaultKind.FILL_DISK, step=2),)},
    )
    assert done.fired == [(1, "fill-disk", 2, "saving")]
    assert not done.errors
    written = {report.step: report.error for report in done.of(CheckpointReport)}
    failure = written.pop(2)
    assert failure is not None
    assert failure.startswith("No space left on device")
    assert written == {4: None, 5: None}
    assert [ref.step for ref in checkpoints(str(tmp_path))] == [5, 4]
    assert done.state_sha256 == quiet


def test_a_kill_while_saving_leaves_no_checkpoint_of_that_step(tmp_path: Path) -> None:
    done = drill(
        three_ranks(tmp_path, steps=7, checkpoint=CheckpointConfig(every_steps=2)),
        {1: (Fault(kind=FaultKind.KILL, step=6, phase=FaultPhase.SAVING),)},
    )
    assert done.fired == [(1, "kill", 6, "saving")]
    assert done.errors[1] == "died"
    # A checkpoint is complete once a commit has carried all ranks' file records. For step 4 it may not have
    # done so.
    whole = [ref.step for ref in checkpoints(str(tmp_path))]
    assert whole in ([4, 2], [2])


def test_a_corrupted_checkpoint_is_found_when_it_is_read(tmp_path: Path) -> None:
    run_threads(three_ranks(tmp_path, steps=4))
    done = drill(three_ranks(tmp_path, steps=2), {0: (Fault(kind=FaultKind.CORRUPT_CHECKPOINT, step=1),)})
    assert done.fired == [(0, "corrupt-checkpoint", 1, "forward")]
    assert not done.errors
    newest, other = checkpoints(str(tmp_path))
    assert (newest.step, other.step) == (4, 2)
    assert [len(damaged_layers(ref)) for ref in (newest, other)] == [1, 0]


def damaged_layers(ref: CheckpointRef) -> list[int]:
    found = []
    for layer in range(8):
        try:
            read_layer(ref, read_manifest(ref), layer)
        except DamagedCheckpointError:
            found.append(layer)
    return found
