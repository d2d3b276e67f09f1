"""Freezing that changes while a job trains: another method, another table, off; the bits depend on the steps alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from test_freezing_training import METHODS, RATIOS, SHAPES, frozen_actions, steps_of

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.freezing import FreezeOverrides, FreezePlan, Phases
from workers.checkpoint.folder import checkpoints
from workers.config import FreezeConfig, WorkerConfig
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.launch.ranks import LaunchedRun
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeReport, FreezeStarted, TimelineReport

STEPS = 14
PHASES = Phases(warm_up=0, monitoring=2, ramp=4)
NOTHING = ((0.0,) * 4,) * 8


def control(version: int, method: str, start: int | None = None, **changes: object) -> FreezePlan:
    """A plan that changes the method, with nothing solved."""
    phases = PHASES if method.startswith("timelyfreeze") else None
    fields = {"method": method, "r_max": 0.5, "phases": phases, **changes}
    changed = FreezeOverrides(**fields)  # pyright: ignore[reportArgumentType]
    return FreezePlan(epoch=1, version=version, ratios=NOTHING, control=changed, start=start)


def solved(version: int, method: str, since: int, start: int) -> FreezePlan:
    changed = FreezeOverrides(method=method, r_max=0.5, phases=PHASES, since=since, solved=True)
    stages = ((0, 3), (3, 8))
    return FreezePlan(epoch=1, version=version, ratios=RATIOS, stages=stages, control=changed, start=start)


def changes_of(method: str) -> tuple[FreezePlan, ...]:
    """On with step 3, solved with step 6 if the method has a program, off with step 10, on again with step 12."""
    timely = method.startswith("timelyfreeze")
    return (
        control(1, method, start=3),
        *([solved(2, method, since=3, start=6)] if timely else []),
        control(3, "none", start=10),
        solved(4, method, since=3, start=12) if timely else control(4, method, start=12),
    )


def configured(folder: Path, method: str) -> WorkerConfig:
    """A job whose own method is `none`, with settings by which something becomes stable."""
    return small_config(folder, steps=STEPS, freeze=METHODS[method].model_copy(update={"method": "none"}))


def frozen_shares(run: LaunchedRun) -> dict[int, float]:
    """Step -> the mean frozen share of its actions."""
    shares: dict[int, list[float]] = {}
    for report in run.reports:
        if isinstance(report, FreezeReport):
            shares.setdefault(report.step, []).extend(action.actual for action in report.actions)
    return {step: sum(each) / len(each) if each else 0.0 for step, each in sorted(shares.items())}


def test_the_settings_in_force_are_those_of_the_last_plan_that_has_started() -> None:
    own = FreezeConfig(method="apf", warm_up=7)
    settings = FreezeSettings(own, FreezePlans(changes_of("timelyfreeze")))
    assert settings.at(2) is own
    found = [settings.at(step) for step in (3, 6, 10, 12)]
    assert [each.method for each in found] == ["timelyfreeze", "timelyfreeze", "none", "timelyfreeze"]
    assert found[0] == found[1] == found[3]
    assert found[0].phases == Phases(warm_up=2, monitoring=4, ramp=6)
    assert FreezeSettings(own, FreezePlans([control(1, "autofreeze", start=5)])).at(5).warm_up == 4


# Two partitions, and stops at commits at which the settings change.
@pytest.mark.each_choice
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["split", "recompute", "stopped at 2", "stopped at 9"])
def test_changes_give_the_same_bits_on_any_partition_and_after_stops(
    tmp_path: Path, method: str, way: str
) -> None:
    config, plans = configured(tmp_path / "whole", method), changes_of(method)
    expected = run_threads(job(config, freeze_plans=plans, ranks=1))
    shares = frozen_shares(expected)
    assert min(shares) == 3
    assert max(shares) == STEPS
    assert max(shares[step] for step in range(5, 10)) > 0
    assert shares[10] == shares[11] == 0
    if method.startswith("timelyfreeze"):
        assert max(shares[step] for step in range(12, STEPS + 1)) > 0
    never = run_threads(job(config, ranks=1))
    assert never.state_sha256 != expected.state_sha256
    if way.startswith("stopped"):
        again = changed(config, output=str(tmp_path / "stopped"))
        stop_at = int(way.removeprefix("stopped at "))
        first, second = {"ranks": 2, "schedule": "1f1b"}, {"ranks": 4, "schedule": "zb-h1"}
        stopped = run_threads(job(again, freeze_plans=plans, stop_at=stop_at, **first))
        start = checkpoints(again.job.folder)[0]
        resumed = run_threads(job(again, freeze_plans=plans, start=start, generation=2, **second))
        assert resumed.state_sha256 == expected.state_sha256
        assert steps_of(stopped) + steps_of(resumed) == steps_of(expected)
    else:
        shape = SHAPES[1] if way == "split" else SHAPES[2]
        run = run_threads(job(config, freeze_plans=plans, **shape))
        assert run.state_sha256 == expected.state_sha256
        assert steps_of(run) == steps_of(expected)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "method", ["timelyfreeze+apf", "autofreeze", pytest.param("timelyfreeze", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_changes_made_while_training_are_replayed_to_the_bit(
    tmp_path: Path, method: str, shape: dict[str, Any]
) -> None:
    own = METHODS[method].model_copy(update={"method": "apf"})
    config = small_config(tmp_path, "dropout", steps=STEPS + 2, freeze=own, timeline_every=1)
    due = ((2, control(1, method)), (9, control(2, "none")), (11, control(3, "timelyfreeze+apf")))
    live = run_threads(job(config, ranks=4, schedule="1f1b", prepare=due))
    started = tuple(r.plan for r in live.reports if isinstance(r, FreezeStarted))
    assert [plan.control for plan in started] == [plan.control for _, plan in due]
    again = run_threads(job(config, freeze_plans=started, **shape))
    assert again.state_sha256 == live.state_sha256
    same = run_threads(job(config, ranks=4, schedule="1f1b", freeze_plans=started))
    assert frozen_actions(same) == frozen_actions(live)


def test_monitoring_that_is_switched_on_is_timed_from_its_start(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=8)
    run = run_threads(job(config, freeze_plans=(control(1, "timelyfreeze", start=4),)))
    assert {r.step for r in run.reports if isinstance(r, TimelineReport)} == {4, 5, 8}
    assert frozen_shares(run) == {4: 0.0, 5: 1.0, 6: 0.0, 7: 0.0, 8: 0.0}


def test_a_plan_without_settings_is_refused_where_the_job_has_no_ratios(tmp_path: Path) -> None:
    plan = FreezePlan(epoch=1, version=1, ratios=NOTHING, start=2)
    with pytest.raises(JobError, match="'none', which follows no ratios"):
        run_threads(job(small_config(tmp_path), freeze_plans=(plan,)))
