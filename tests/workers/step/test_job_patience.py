"""A job whose patience is over ends at one step, whatever happens to its ranks before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, with_standbys
from test_snapshots import slow, snapshot, with_snapshots

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import checkpoints, read_manifest, write_manifest
from workers.config import CheckpointConfig, WorkerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.protocol.reports import ValidationReport

STEPS, PATIENCE = 24, 4


def config_of(folder: Path, **changes: Any) -> WorkerConfig:
    """A job whose labels are drawn at random, so that its loss on held-out samples soon grows."""
    settings: dict[str, Any] = {"steps": STEPS, "validate_every": 1, "patience": PATIENCE, **changes}
    return small_config(folder, **settings)


def validated(config: WorkerConfig, **how: Any) -> dict[int, float]:
    reports = run_threads(job(config, **how)).reports
    return {each.step: each.loss for each in reports if isinstance(each, ValidationReport)}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Step -> loss, of the job without patience."""
    return validated(config_of(tmp_path_factory.mktemp("told"), patience=None))


def end_of(told: dict[int, float], patience: int) -> tuple[int, str]:
    """The step at which the job is to end, and what is said."""
    best = 1
    for step in range(1, STEPS):
        if told[step] < told[best]:
            best = step
        if step - best == patience:
            return step, f"no better than loss {told[best]:.4g} of step {best} in {patience} validations"
    raise AssertionError(told)


@pytest.fixture(scope="module")
def end(told: dict[int, float]) -> tuple[int, str]:
    step, said = end_of(told, PATIENCE)
    assert " of step 1 " not in said, "it got better first"
    return step, said


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_ends_once_no_validation_was_better_for_so_long(
    ranks: int, end: tuple[int, str], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    run = run_threads(job(config, ranks=ranks, schedule="1f1b"))
    assert {(each.step, each.plateau, each.reached, each.stopped) for each in run.outcomes} == {
        (*end, "", False)
    }
    (ref,) = checkpoints(str(tmp_path))
    assert ref.step == end[0]
    assert [each.step for each in read_manifest(ref).validations] == [*range(1, end[0] + 1)]


def test_a_job_that_trains_all_its_steps_has_not_ended_early(end: tuple[int, str], tmp_path: Path) -> None:
    run = run_threads(job(config_of(tmp_path, steps=end[0])))
    assert {(each.step, each.plateau) for each in run.outcomes} == {(end[0], "")}


@pytest.mark.parametrize("before", [0, 2])
def test_a_rank_that_dies_changes_nothing(before: int, end: tuple[int, str], tmp_path: Path) -> None:
    config = drilled(config_of(tmp_path))
    three, two = (job(config, ranks=ranks, schedule="1f1b") for ranks in (3, 2))
    lost = end[0] - before
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=lost, phase=FaultPhase.AFTER_COMMIT))
        group.train(three, range(3), plan=with_standbys(three))
        assert group.fired == [(1, "kill", lost, FaultPhase.AFTER_COMMIT)]
        step, _, sources = group.finish_commit()
        ended = group.train(two, (0, 2), step=step, sources=sources)
        assert {(each.step, each.plateau) for each in ended.values()} == {end}


def test_a_return_to_a_snapshot_forgets_no_validation_and_counts_none_twice(
    end: tuple[int, str], tmp_path: Path
) -> None:
    config = drilled(config_of(tmp_path))
    four, three = (with_snapshots(job(config, ranks=ranks, schedule="1f1b"), every=2) for ranks in (4, 3))
    lost = end[0] - 1
    with RankGroup(config, 4) as group:
        slow(group, range(4))
        group.arm(1, Fault(kind=FaultKind.KILL, step=lost, phase=FaultPhase.BACKWARD))
        group.train(four, range(4))
        assert (1, "kill", lost, str(FaultPhase.BACKWARD)) in group.fired
        _, positions, _ = group.finish_commit()
        step, sources, carried = snapshot(positions)
        assert 0 < step < lost
        ended = group.train(three, (0, 2, 3), step=step, sources=sources, carried=carried)
        assert {(each.step, each.plateau) for each in ended.values()} == {end}


@pytest.mark.parametrize("whole", [True, False])
def test_a_resumed_job_goes_on_counting(whole: bool, end: tuple[int, str], tmp_path: Path) -> None:
    """Also from a checkpoint without the validation after its step, as one that was written in haste."""
    config = config_of(tmp_path, checkpoint=CheckpointConfig(every_steps=1, keep=9))
    run_threads(job(config, ranks=2, schedule="1f1b", stop_at=end[0] - 1))
    (newest, *_) = checkpoints(str(tmp_path))
    manifest = read_manifest(newest)
    assert len(manifest.validations) == newest.step == end[0] - 1
    if not whole:
        write_manifest(newest.path, replace(manifest, validations=manifest.validations[:-1]))
    run = run_threads(job(config, start=newest, generation=2))
    assert {(each.step, each.plateau) for each in run.outcomes} == {end}
    validations = [each.step for each in run.reports if isinstance(each, ValidationReport)]
    assert validations == [*range(newest.step + whole, end[0] + 1)]
    again = run_threads(job(config, start=checkpoints(str(tmp_path))[0], generation=3))
    assert {(each.step, each.plateau) for each in again.outcomes} == {end}
    assert not again.reports, "there is nothing left to do"


def test_longer_patience_goes_on_from_where_a_job_has_ended(told: dict[int, float], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_threads(job(config))
    (ref,) = checkpoints(str(tmp_path))
    longer = run_threads(job(changed(config, patience=PATIENCE + 2), start=ref, generation=2))
    assert {(each.step, each.plateau) for each in longer.outcomes} == {end_of(told, PATIENCE + 2)}
