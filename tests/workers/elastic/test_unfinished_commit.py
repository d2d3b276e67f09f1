"""A commit in which ranks are lost has one outcome, whichever ranks saw it, and the same bits afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import Raised, RankGroup, drilled, state_sha256, with_standbys

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import checkpoints
from workers.config import CheckpointConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.protocol.orders import Request
from workers.protocol.reports import RankPosition, StepReport, ValidationReport

KILL_STEP = 3


def kill(phase: FaultPhase) -> Fault:
    return Fault(kind=FaultKind.KILL, step=KILL_STEP, phase=phase)


BLIND = Fault(kind=FaultKind.BLIND, step=KILL_STEP)


@pytest.mark.parametrize(
    ("phase", "blind", "reached"),
    [
        pytest.param(FaultPhase.BACKWARD, (), KILL_STEP - 1, marks=pytest.mark.soak),
        (FaultPhase.BEFORE_COMMIT, (), KILL_STEP - 1),
        (FaultPhase.IN_COMMIT, (0, 3), KILL_STEP),
        (FaultPhase.IN_COMMIT, (0, 1, 3), KILL_STEP - 1),
        (FaultPhase.AFTER_COMMIT, (), KILL_STEP),
    ],
)
def test_a_kill_in_the_commit_has_one_outcome(
    tmp_path: Path, phase: FaultPhase, blind: tuple[int, ...], reached: int
) -> None:
    precision = "bfloat16" if phase is FaultPhase.IN_COMMIT else "float32"
    config = drilled(small_config(tmp_path, "batchnorm", steps=6, precision=precision))
    expected = run_threads(job(config))
    four = job(config, ranks=4, schedule="1f1b")
    with RankGroup(config, 4) as group:
        group.arm(2, kill(phase))
        for number in blind:
            group.arm(number, BLIND)
        ended = group.train(four, range(4), plan=with_standbys(four))
        assert isinstance(ended[2], Died)
        assert all(isinstance(ended[number], Raised) for number in (0, 1, 3)), ended
        assert (2, "kill", KILL_STEP, phase) in group.fired
        before: dict[int, RankPosition] = group.each("position")
        assert [before[number].undecided for number in blind] == [KILL_STEP] * len(blind)
        step, positions, sources = group.finish_commit()
        assert step == reached
        assert {p.step for p in positions.values()} == {reached}
        assert all(p.undecided is None for p in positions.values())
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        three = job(config, ranks=3, schedule="1f1b")
        ended = group.train(three, (0, 1, 3), plan=with_standbys(three), step=step, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
        quiet = [r for r in expected.reports if isinstance(r, StepReport)]
        told = group.steps()
        assert sorted(told) == list(range(1, 7))
        assert [told[r.step].loss for r in quiet] == [r.loss for r in quiet]
        assert [told[r.step].samples_digest for r in quiet] == [r.samples_digest for r in quiet]


def test_what_was_asked_for_in_a_commit_that_is_undone_is_asked_for_again(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=6))
    two = job(config, ranks=2, schedule="1f1b")
    with RankGroup(config, 2) as group:
        for number in range(2):
            group.arm(number, Fault(kind=FaultKind.BLIND, step=1))
        group.tell(0, "request", Request.STOP)
        ended = group.train(two, range(2))
        assert all(isinstance(answer, Raised) for answer in ended.values())
        step, _, sources = group.finish_commit()
        assert step == 0
        ended = group.train(two, range(2), step=step, sources=sources)
        assert {(outcome.step, outcome.stopped) for outcome in ended.values()} == {(1, True)}


def test_a_stop_that_the_last_of_a_generation_agreed_on_is_done_by_the_next(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=6))
    three = job(config, ranks=3, schedule="1f1b")
    with RankGroup(config, 3) as group:
        group.arm(2, Fault(kind=FaultKind.KILL, step=1, phase=FaultPhase.IN_COMMIT))
        group.arm(0, Fault(kind=FaultKind.BLIND, step=1))
        group.tell(0, "request", Request.STOP)
        group.train(three, range(3), plan=with_standbys(three))
        step, _, sources = group.finish_commit()
        assert step == 1
        two = job(config, ranks=2, schedule="1f1b")
        ended = group.train(two, (0, 1), step=step, sources=sources)
        assert {(outcome.step, outcome.stopped) for outcome in ended.values()} == {(1, True)}
        assert sorted(group.steps()) == [1]
    assert [ref.step for ref in checkpoints(config.job.folder)] == [1]


def test_a_validation_and_a_checkpoint_that_a_loss_cut_off_are_done_again(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "quiet", steps=4, validate_every=2, checkpoint=CheckpointConfig(every_steps=2, keep=9)
    )
    quiet = run_threads(job(config))
    validations = {r.step: r.loss for r in quiet.reports if isinstance(r, ValidationReport)}
    again = drilled(changed(config, output=str(tmp_path / "lost")))
    three = job(again, ranks=3, schedule="1f1b")
    with RankGroup(again, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=2, phase=FaultPhase.AFTER_COMMIT))
        group.train(three, range(3), plan=with_standbys(three))
        step, _, sources = group.finish_commit()
        assert step == 2
        two = job(again, ranks=2, schedule="1f1b")
        assert state_sha256(group.train(two, (0, 2), step=step, sources=sources)) == quiet.state_sha256
        told = group.of(ValidationReport)
        assert {r.step: r.loss for r in told} == validations
        assert len(told) == len(validations)
    assert [ref.step for ref in checkpoints(again.job.folder)] == [4, 2]


def test_a_checkpoint_that_nobody_knows_to_be_whole_is_made_up_for_at_once(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=6, checkpoint=CheckpointConfig(every_steps=3, keep=9)))
    three = job(config, ranks=3, schedule="1f1b")
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=4, phase=FaultPhase.AFTER_COMMIT))
        group.train(three, range(3), plan=with_standbys(three))
        step, _, sources = group.finish_commit()
        assert step == 4
        assert group.fired == [(1, "kill", 4, "after-commit")]
        two = job(config, ranks=2, schedule="1f1b")
        group.train(two, (0, 2), step=step, sources=sources)
    assert {4, 6} <= {ref.step for ref in checkpoints(config.job.folder)}, "not the one of step 3 alone"
