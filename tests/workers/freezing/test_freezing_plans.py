"""Freeze plans reach the ranks: prepared anywhere, adopted by all at one commit, from a known step on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config

from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from planner.codec import from_json, to_json
from planner.freezing import FreezeOverrides, FreezePlan
from workers.commit.commit import CommitRecord, decide
from workers.config import FreezeConfig
from workers.control.mailbox import Mailbox
from workers.freezing.plans import FreezePlans, check_plan
from workers.launch.ranks import LaunchedRun, assignment
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import FreezeStarted
from workers.rank import Rank

OFF = FreezeOverrides(method="none", r_max=0.8)
TIMELY = FreezeConfig(method="timelyfreeze", warm_up=1, monitoring=3, ramp=5)


def plan(version: int = 1, ratio: float = 0.5, start: int | None = None) -> FreezePlan:
    return FreezePlan(epoch=1, version=version, ratios=((ratio,) * 4,) * 8, start=start)


def started(run: LaunchedRun) -> list[FreezePlan]:
    return [report.plan for report in run.reports if isinstance(report, FreezeStarted)]


def records(*prepared: FreezePlan | None) -> list[CommitRecord]:
    return [
        CommitRecord(
            rank=rank,
            generation=1,
            step=4,
            losses={0: 1.0} if rank == 0 else {},
            squared_norms={0: 1.0} if rank == 0 else {},
            prepared=None if one is None else (one.epoch, one.version, one.digest),
        )
        for rank, one in enumerate(prepared)
    ]


@pytest.mark.parametrize(
    ("prepared", "newest", "taken"),
    [
        ((plan(1), plan(1)), None, True),
        ((plan(2), plan(2)), (1, 1), True),
        ((plan(1), None), None, False),
        ((None, None), None, False),
        ((plan(1), plan(2)), None, False),
        ((plan(1, 0.5), plan(1, 0.25)), None, False),
        ((plan(1), plan(1)), (1, 1), False),
        ((plan(1), plan(1)), (2, 0), False),
    ],
)
def test_a_plan_is_taken_up_when_all_hold_the_same_new_one(prepared, newest, taken: bool) -> None:
    sent = [from_json(CommitRecord, to_json(record)) for record in records(*prepared)]
    decision = decide(sent, microbatches=1, layers=1, clip_norm=None, lr=0.1, newest=newest)
    assert (decision.adopt is not None) == taken
    if taken:
        assert decision.adopt == (prepared[0].epoch, prepared[0].version, prepared[0].digest)


def test_a_digest_is_formed_once_and_does_not_know_the_start() -> None:
    one = plan()
    assert one.digest is one.digest
    assert plan(start=7).digest == one.digest
    others = (plan(2), plan(ratio=0.25), replace(one, weights=((("w", 1),),) * 8), replace(one, control=OFF))
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert one == plan()
    assert json.loads(one.to_json()).keys() == {
        "epoch",
        "version",
        "ratios",
        "stages",
        "weights",
        "control",
        "start",
    }


def test_the_plan_in_force_is_the_last_that_has_started() -> None:
    plans = FreezePlans([plan(2, start=9), plan(1, start=4)])
    assert [None if p is None else p.version for p in map(plans.at, (3, 4, 8, 9, 50))] == [None, 1, 1, 2, 2]
    assert [plans.all_begun(step) for step in (8, 9)] == [False, True]
    assert plans.adopt(plan(3), 12) == plan(3, start=12)
    assert plans.newest == (1, 3)
    assert plans.at(12) == plan(3, start=12)


def test_a_plan_for_another_model_or_with_odd_ratios_is_refused() -> None:
    check_plan(plan(), TIMELY, 8, 4)
    with pytest.raises(
        JobError, match=r"ratios for 8 layers and \[4\] microbatches; the job has 9 layers and 4"
    ):
        check_plan(plan(), TIMELY, 9, 4)
    for odd in (-0.1, 1.5, float("nan")):
        with pytest.raises(JobError, match=r"ratios outside \[0, 1\]"):
            check_plan(plan(ratio=odd), TIMELY, 8, 4)
    check_plan(replace(plan(), weights=((("w", 1),),) * 8), TIMELY, 8, 4)
    with pytest.raises(JobError, match="weights for 7 layers; the job has 8"):
        check_plan(replace(plan(), weights=((("w", 1),),) * 7), TIMELY, 8, 4)


def test_a_plan_prepared_by_all_ranks_starts_at_the_step_after_the_commit(tmp_path: Path) -> None:
    config = small_config(tmp_path, freeze=TIMELY)
    run = run_threads(job(config, ranks=2, schedule="1f1b", prepare=((0, plan()),)))
    assert started(run) == [plan(start=2)]


def test_what_is_prepared_waits_for_the_plans_whose_start_is_known(tmp_path: Path) -> None:
    config = small_config(tmp_path, freeze=TIMELY)
    known = plan(1, start=3)
    newer = job(config, ranks=2, schedule="1f1b", freeze_plans=(known,), prepare=((0, plan(2)),))
    assert started(run_threads(newer)) == [plan(2, start=4)]
    older = job(config, ranks=2, schedule="1f1b", freeze_plans=(known,), prepare=((0, plan(1)),))
    assert started(run_threads(older)) == []


def test_a_mailbox_holds_the_newest_plan() -> None:
    mailbox = Mailbox()
    for version in (1, 3, 2):
        mailbox.prepare(plan(version))
    assert mailbox.prepared() == plan(3)
    mailbox.prepare(FreezePlan(epoch=2, version=1, ratios=plan().ratios))
    assert mailbox.prepared() == FreezePlan(epoch=2, version=1, ratios=plan().ratios)


def test_a_new_generation_voids_what_is_prepared(tmp_path: Path) -> None:
    config = small_config(tmp_path, freeze=TIMELY)
    work, reports = job(config), []
    rank = Rank(config, 0, reports.append)
    rank.setup()
    rank.follow(assignment(work, 0))
    rank.prepare(plan())
    generation = Generation(number=2, epoch=1, members=(0,), store_host="", store_port=0, timeout_s=10.0)
    rank.join(generation, LocalChannel(Hub(1), 0))
    rank.train()
    rank.close()
    assert not any(isinstance(report, FreezeStarted) for report in reports)


def test_a_plan_for_a_method_without_ratios_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, freeze=FreezeConfig(method="apf", warm_up=0))
    with pytest.raises(JobError, match="'apf', which follows no ratios"):
        run_threads(job(config, prepare=((0, plan()),)))
