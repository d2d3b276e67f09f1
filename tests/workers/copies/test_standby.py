"""Copies of layers that take over from lost owners: the same bits, whatever state a layer keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, quiet_sha256, state_sha256, with_standbys
from test_engine_bits import real_config
from test_freezing_control import control, solved
from test_freezing_training import FIRST, METHODS, SECOND

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.freezing import Phases
from workers.config import ModelConfig, OptimizerConfig, Precision, WorkerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.protocol.reports import FreezeReport, RankPosition

PRECISION: dict[str, Precision] = {"batchnorm": "bfloat16", "timelyfreeze+apf": "bfloat16"}
"""Of the cases that do not train in float32."""


def configured(tmp_path: Path, case: str) -> tuple[WorkerConfig, dict[str, Any]]:
    """The configuration of a job, and further arguments for its plan."""
    if case == "gpt":
        config = real_config(tmp_path, "gpt", microbatch_size=1, steps=6)
        model = ModelConfig(
            family="gpt", layers=6, width=32, heads=2, context=16, tied_embeddings=True, dropout=0.1
        )
        return drilled(config.model_copy(update={"model": model})), {"layers": 8}
    if case in METHODS:
        plans = (FIRST, SECOND) if METHODS[case].timely else ()
        precision = PRECISION.get(case, "float32")
        config = small_config(tmp_path, "tied", steps=8, freeze=METHODS[case], precision=precision)
        return drilled(config), {"freeze_plans": plans}
    if case == "changed":
        # Rank 1 is killed in the first step that follows the plan: the copies have changed with it.
        changed = control(1, "timelyfreeze+apf", start=5, phases=Phases(warm_up=0, monitoring=2, ramp=2))
        spread = replace(
            solved(2, "timelyfreeze+apf", since=5, start=7), control=replace(changed.control, since=5)
        )
        own = METHODS["timelyfreeze+apf"].model_copy(update={"method": "apf"})
        return drilled(small_config(tmp_path, "tied", steps=9, freeze=own)), {
            "freeze_plans": (changed, spread)
        }
    if case == "sgd":
        sgd = OptimizerConfig(name="sgd", lr=0.05)
        return drilled(small_config(tmp_path, "twice", steps=6, optimizer=sgd)), {}
    precision = PRECISION.get(case, "float32")
    return drilled(small_config(tmp_path, case, steps=6, precision=precision)), {}


# The other methods are made of these two: a program's ratios, and statistics of two kinds.
@pytest.mark.parametrize(
    "case",
    [
        *("gpt", "tied", "batchnorm", "dropout", "sgd", "changed", "timelyfreeze+apf", "autofreeze"),
        *(
            pytest.param(method, marks=pytest.mark.soak)
            for method in METHODS
            if method not in ("timelyfreeze+apf", "autofreeze")
        ),
    ],
)
def test_a_copy_takes_over_with_the_same_bits(tmp_path: Path, case: str) -> None:
    config, about = configured(tmp_path, case)
    expected = run_threads(job(config, **about)).state_sha256
    three = job(config, ranks=3, schedule="zb-h1", **about)
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=5, phase=FaultPhase.BACKWARD))
        group.train(three, range(3), plan=with_standbys(three))
        step, positions, sources = group.finish_commit()
        assert step == 4
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        # Rank 2 keeps copies of rank 1's layers, and rank 0 of rank 2's.
        two = job(config, ranks=2, schedule="1f1b", **about)
        ended = group.train(two, (0, 2), plan=with_standbys(two), step=step, sources=sources)
        assert state_sha256(ended) == expected
        if case in {*METHODS, "changed"}:
            assert any(report.step > 4 for report in group.of(FreezeReport))


@pytest.mark.parametrize("case", ["batchnorm", "timelyfreeze+apf", "changed"])
def test_copies_made_again_while_training_goes_on_take_over_the_next_time(tmp_path: Path, case: str) -> None:
    config, about = configured(tmp_path, case)
    # The test stops the job once everything has happened.
    config = changed(config, steps=10_000)
    shrinking = [job(config, ranks=ranks, schedule="1f1b", **about) for ranks in (4, 3, 2, 1)]
    members = [0, 1, 2, 3]
    with RankGroup(config, 4) as group:
        step, sources = 0, []
        for now, lost in zip(shrinking[:-1], (2, 0, 3), strict=True):
            protected = group.protected(len(now.plan.layers))

            def kill(protected: Callable[[], None] = protected, lost: int = lost) -> None:
                protected()
                group.tell(lost, "die")

            group.train(now, members, plan=with_standbys(now), step=step, sources=sources, meanwhile=kill)
            members.remove(lost)
            reached, positions, sources = group.finish_commit()
            assert reached > step
            assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
            step = reached
        ended = group.train(shrinking[-1], members, step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[members[0]].step + 1))


def test_a_rank_that_comes_and_one_that_goes_leave_the_bits_alone(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "batchnorm")
    expected = run_threads(job(config, **about)).state_sha256
    two, three = (job(config, ranks=ranks, schedule="1f1b") for ranks in (2, 3))
    with RankGroup(config, 3) as group:
        assert parted(group.train(two, (0, 1), plan=with_standbys(two), regroup_by=1)) == {1}
        step, _, sources = group.finish_commit()
        # The new rank fetches the layers that it will own.
        plan = with_standbys(three)
        ended = group.train(three, (0, 2, 1), plan=plan, step=step, sources=sources, regroup_by=0)
        assert parted(ended) == {2}
        step, positions, sources = group.finish_commit()
        # Rank 0 leaves; the others fetch from it what it alone holds.
        plan = replace(with_standbys(two), reason="drain")
        ended = group.train(two, (1, 2), plan=plan, step=step, sources=sources)
        assert state_sha256(ended) == expected
        assert positions[0].holds


def test_ranks_lost_while_others_fetch_cost_nothing_that_is_held(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "batchnorm")
    expected = run_threads(job(config, **about)).state_sha256
    four = job(config, ranks=4, schedule="1f1b")
    with RankGroup(config, 4) as group:
        group.arm(3, Fault(kind=FaultKind.KILL, step=3, phase=FaultPhase.FORWARD))
        group.arm(1, Fault(kind=FaultKind.KILL, step=2, phase=FaultPhase.RECOVERING))
        group.train(four, range(4), plan=with_standbys(four))
        step, _, sources = group.finish_commit()
        assert step == 2
        three = job(config, ranks=3, schedule="1f1b")
        with pytest.raises(AssertionError, match=r"Died|Gone"):
            group.train(three, (0, 1, 2), plan=with_standbys(three), step=step, sources=sources)
        step, positions, sources = group.finish_commit()
        assert step == 2
        held: set[int] = {piece.layer for p in positions.values() for piece in p.holds}
        position: RankPosition = positions[0]
        assert held == set(range(8)), position
        two = job(config, ranks=2, schedule="1f1b")
        ended = group.train(two, (0, 2), plan=with_standbys(two), step=step, sources=sources)
        assert state_sha256(ended) == expected
