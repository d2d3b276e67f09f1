"""Siblings that share out states freeze what siblings that have all of them do, bit for bit, and keep the same
statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256
from test_freezing_control import STEPS, changes_of, configured, control
from test_freezing_training import FIRST, METHODS, SECOND, frozen_job, steps_of
from test_gradient_shards import folded
from test_shard_copies import copied
from test_shard_recovery import LAYERS, lose_rank_1, one_pipeline
from test_shared_states import assert_same, shared

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.schedule.expand import pipeline_schedules
from workers.checkpoint.folder import checkpoints, read_layer, read_manifest
from workers.config import CheckpointConfig, OptimizerConfig, WorkerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.launch.ranks import LaunchedJob, LaunchedRun
from workers.protocol.reports import FreezeReport, FreezeStarted
from workers.state.layer_state import LayerState

STATISTICS = {"apf": {"energy", "reference", "checks", "settled", "trend", "travel"}}
STATISTICS["autofreeze"] = {"energy", "reference", "checks", "settled", "squares"}


def freezing_config(output: Path, method: str, trait: str = "plain", **changes: Any) -> WorkerConfig:
    return small_config(output, trait, **{"steps": 8, "replicas": 2, "freeze": METHODS[method], **changes})


def unequal(work: LaunchedJob, *shares: int) -> LaunchedJob:
    """`work` with states shared out among pipelines with these shares of the microbatches."""
    plan = replace(shared(work).plan, shares=shares)
    return replace(work, plan=plan, shared=pipeline_schedules(plan, work.schedule))


def frozen_counts(run: LaunchedRun) -> Counter[tuple[int, int, int]]:
    """How often (step, layer, number of parameter) was frozen, over all pipelines."""
    found: Counter[tuple[int, int, int]] = Counter()
    for report in run.reports:
        if isinstance(report, FreezeReport):
            for layer, counts in report.counts:
                found.update({(report.step, layer, number): count for number, count in enumerate(counts)})
    return found


def assert_frozen_alike(found: LaunchedRun, expected: LaunchedRun) -> None:
    assert_same(found, expected)
    # As text: no number equals nan, which a skipped step's norm is.
    assert repr(steps_of(found)) == repr(steps_of(expected))
    counts = frozen_counts(expected)
    assert frozen_counts(found) == counts
    assert 0 < sum(count > 0 for count in counts.values()) < len(counts), "some parameters freeze, not all"


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("method", "trait", "precision", "schedule", "pipelines"),
    [
        ("timelyfreeze", "plain", "float32", "gpipe", 3),
        ("timelyfreeze", "tied", "bfloat16", "zb-h1", 2),
        ("apf", "tied", "float32", "1f1b", 3),
        ("apf", "batchnorm", "bfloat16", "gpipe", 2),
        ("apf", "dropout", "float16", "zbv", 3),
        ("autofreeze", "plain", "float32", "zb-h1", 2),
        ("autofreeze", "tied", "bfloat16", "1f1b", 3),
        ("timelyfreeze+apf", "raw-matrix", "bfloat16", "1f1b", 3),
        ("timelyfreeze+apf", "fixed", "float32", "gpipe", 2),
        ("timelyfreeze+autofreeze", "attention", "float32", "interleaved", 3),
        ("timelyfreeze+autofreeze", "tied", "bfloat16", "zb-h1", 2),
    ],
)
def test_the_bits_are_those_of_whole_states(
    tmp_path: Path, method: str, trait: str, precision: str, schedule: str, pipelines: int
) -> None:
    config = freezing_config(tmp_path, method, trait, precision=precision, replicas=3)
    expected = run_threads(frozen_job(config, ranks=1))
    found = run_threads(shared(frozen_job(config, ranks=2, schedule=schedule), pipelines))
    assert len(found.outcomes) == 2 * pipelines
    assert_frozen_alike(found, expected)


@pytest.mark.parametrize(
    ("method", "trait", "precision", "schedule", "pipelines"),
    [
        ("timelyfreeze", "tied", "bfloat16", "zb-h1", 2),
        ("apf", "dropout", "float16", "zbv", 3),
        ("autofreeze", "tied", "bfloat16", "1f1b", 3),
        ("timelyfreeze+apf", "fixed", "float32", "interleaved", 2),
    ],
)
def test_what_freezes_is_the_same_where_sums_are_shared_out(
    tmp_path: Path, method: str, trait: str, precision: str, schedule: str, pipelines: int
) -> None:
    config = freezing_config(tmp_path, method, trait, precision=precision, replicas=3)
    expected = run_threads(folded(frozen_job(config, ranks=1), 1))
    found = run_threads(folded(frozen_job(config, ranks=2, schedule=schedule), pipelines))
    assert_frozen_alike(found, expected)


@pytest.mark.parametrize("method", ["apf", "timelyfreeze+autofreeze"])
def test_uneven_shares_keep_the_bits(tmp_path: Path, method: str) -> None:
    sgd = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
    config = freezing_config(tmp_path, method, optimizer=sgd, precision="bfloat16")
    uneven = unequal(frozen_job(config, ranks=2, schedule="zb-h1"), 6, 2)
    assert_frozen_alike(run_threads(uneven), run_threads(frozen_job(config, ranks=1)))


def statistics(config: WorkerConfig) -> list[LayerState]:
    """The layers of the newest checkpoint."""
    start = checkpoints(config.job.folder)[0]
    return [read_layer(start, read_manifest(start), layer) for layer in LAYERS]


def assert_same_statistics(one: list[LayerState], other: list[LayerState], method: str) -> None:
    kept = STATISTICS.get(method.rpartition("+")[2], {"energy"})
    for mine, theirs in zip(one, other, strict=True):
        assert mine.freezing.keys() == theirs.freezing.keys() == kept
        for key, value in theirs.freezing.items():
            assert mine.freezing[key].dtype == value.dtype
            assert torch.equal(mine.freezing[key], value), (mine.layer, key)
    assert any(bool(state.freezing["energy"].any()) for state in one)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "method",
    ["apf", "autofreeze", "timelyfreeze+apf", pytest.param("timelyfreeze", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("writer", ["whole", "shared", "unequal"])
def test_a_checkpoint_has_the_statistics_of_whole_states_whoever_reads_it(
    tmp_path: Path, method: str, writer: str
) -> None:
    def config(folder: str) -> WorkerConfig:
        changes = {"precision": "bfloat16", "checkpoint": CheckpointConfig(every_steps=5)}
        return freezing_config(tmp_path / folder, method, "tied", **changes)

    expected = run_threads(frozen_job(config("quiet")))
    two, alone = {"ranks": 2, "schedule": "1f1b"}, {"ranks": 1}
    share, again, shape = {
        "whole": (lambda work: work, shared, two),
        "shared": (shared, lambda work: work, alone),
        "unequal": (shared, lambda work: unequal(work, 5, 3), two),
    }[writer]
    written: dict[str, list[LayerState]] = {}
    for folder, write in (("begun whole", lambda work: work), (writer, share)):
        stopped = run_threads(replace(write(frozen_job(config(folder), **two)), stop_at=5))
        written[folder] = statistics(config(folder))
    assert_same_statistics(written[writer], written["begun whole"], method)
    start = checkpoints(config(writer).job.folder)[0]
    assert start.step == 5
    resumed = run_threads(replace(again(frozen_job(config(writer), **shape)), start=start, generation=2))
    assert resumed.state_sha256 == expected.state_sha256
    assert steps_of(stopped) + steps_of(resumed) == steps_of(expected)
    assert_same_statistics(statistics(config(writer)), statistics(config("quiet")), method)


@pytest.mark.parametrize(
    "method", ["autofreeze", "timelyfreeze+apf", pytest.param("apf", marks=pytest.mark.soak)]
)
def test_what_is_switched_on_and_off_keeps_the_bits_also_after_a_stop(tmp_path: Path, method: str) -> None:
    config = changed(configured(tmp_path / "whole", method), replicas=2)
    plans = changes_of(method)
    expected = run_threads(job(config, freeze_plans=plans, ranks=1))
    assert_frozen_alike(run_threads(shared(job(config, freeze_plans=plans, ranks=2))), expected)
    again = changed(config, output=str(tmp_path / "stopped"))
    # Stopped at the commit before freezing is switched on.
    stopped = run_threads(shared(job(again, ranks=1, stop_at=2)))
    start = checkpoints(again.job.folder)[0]
    work = shared(job(again, freeze_plans=plans, ranks=2, schedule="zb-h1"))
    resumed = run_threads(replace(work, start=start, generation=2))
    assert resumed.state_sha256 == expected.state_sha256
    assert steps_of(stopped) + steps_of(resumed) == steps_of(expected)


def test_a_freeze_plan_that_comes_while_it_trains_and_writes_checkpoints_is_followed(tmp_path: Path) -> None:
    own = METHODS["timelyfreeze+apf"].model_copy(update={"method": "none"})
    written = CheckpointConfig(every_steps=1)
    config = small_config(
        tmp_path, replicas=2, steps=STEPS + 2, freeze=own, timeline_every=1, checkpoint=written
    )
    due = ((2, control(1, "apf")), (8, control(2, "autofreeze")), (12, control(3, "timelyfreeze+apf")))
    live = run_threads(shared(job(config, ranks=2, schedule="1f1b", prepare=due)))
    started = tuple(report.plan for report in live.reports if isinstance(report, FreezeStarted))
    assert [plan.control for plan in started] == [plan.control for _, plan in due]
    assert_frozen_alike(live, run_threads(job(config, freeze_plans=started)))


DYING = 6


@pytest.mark.parametrize(
    ("method", "phase", "blind", "reached", "precision", "then"),
    [
        pytest.param("apf", FaultPhase.BACKWARD, (), DYING - 1, "float32", "spare", marks=pytest.mark.soak),
        ("autofreeze", FaultPhase.AFTER_COMMIT, (), DYING, "bfloat16", "spare"),
        ("timelyfreeze+apf", FaultPhase.IN_COMMIT, (0, 3), DYING, "bfloat16", "fewer"),
        ("timelyfreeze+autofreeze", FaultPhase.IN_COMMIT, (0, 2, 3), DYING - 1, "float32", "whole"),
    ],
)
def test_copies_have_a_killed_ranks_statistics(
    tmp_path: Path,
    method: str,
    phase: FaultPhase,
    blind: tuple[int, ...],
    reached: int,
    precision: str,
    then: str,
) -> None:
    """All that is written of the last step is as in the quiet run, the statistics too."""
    trait = "batchnorm" if method == "apf" else "tied"
    quiet = freezing_config(tmp_path / "quiet", method, trait, precision=precision)
    expected = run_threads(frozen_job(quiet)).state_sha256
    config = drilled(freezing_config(tmp_path / "killed", method, trait, precision=precision))

    def freezes(work: LaunchedJob) -> LaunchedJob:
        return replace(work, freeze_plans=(FIRST, SECOND) if config.freeze.timely else ())

    four = freezes(copied(job(config, ranks=2, schedule="1f1b")))
    with RankGroup(config, 5) as group:
        _, sources = lose_rank_1(group, four, DYING, phase, blind, reached=reached)
        following, members = {
            "spare": (four, (0, 4, 2, 3)),
            "fewer": (freezes(copied(job(config, ranks=1))), (3, 0)),
            "whole": (freezes(one_pipeline(config, 3)), (0, 2, 3)),
        }[then]
        ended = group.train(following, members, step=reached, sources=sources)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 9))
    assert_same_statistics(statistics(config), statistics(quiet), method)


def test_copies_of_unequal_pipelines_have_a_killed_ranks_statistics(tmp_path: Path) -> None:
    """Three pipelines of one rank each; two go on with other cuts."""
    method, changes = "apf", {"replicas": 3, "precision": "bfloat16"}
    quiet = freezing_config(tmp_path / "quiet", method, "tied", **changes)
    expected = run_threads(job(quiet)).state_sha256
    config = drilled(freezing_config(tmp_path / "killed", method, "tied", **changes))
    three = unequal(copied(job(config, ranks=1)), 6, 4, 2)
    two = shared(job(config, ranks=1), 2)
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=DYING, phase=FaultPhase.AFTER_COMMIT))
        ended = group.train(three, range(3))
        assert isinstance(ended[1], Died)
        assert (1, "kill", DYING, "after-commit") in group.fired
        step, _, sources = group.finish_commit()
        assert step == DYING
        ended = group.train(two, (2, 0), step=step, sources=sources)
        assert state_sha256(ended) == expected
    assert_same_statistics(statistics(config), statistics(quiet), method)


@pytest.mark.each_choice
@pytest.mark.parametrize("method", ["timelyfreeze+apf", "autofreeze"])
@pytest.mark.parametrize(
    "order", [("two", "four", "whole", "three"), ("four", "two", "three", "whole")], ids="-".join
)
def test_statistics_follow_layers_into_more_fewer_and_no_shards(
    tmp_path: Path, method: str, order: tuple[str, ...]
) -> None:
    changes: dict[str, Any] = {"replicas": 4, "microbatches": 2, "steps": 9}
    plans = tuple(replace(plan, ratios=tuple(row[:2] for row in plan.ratios)) for plan in (FIRST, SECOND))
    plans = plans if METHODS[method].timely else ()
    quiet = freezing_config(tmp_path / "quiet", method, "dropout", **changes)
    expected = run_threads(job(quiet, freeze_plans=plans)).state_sha256
    config = drilled(freezing_config(tmp_path / "moved", method, "dropout", **changes))
    two, four = shared(job(config, ranks=2, schedule="1f1b"), 2), shared(job(config, ranks=1))
    whole = job(config, ranks=2, schedule="gpipe")
    whole = replace(whole, plan=replace(whole.plan, pipelines=2))
    three = shared(job(config, ranks=1), 3)
    sources, step = [], 0
    with RankGroup(config, 4) as group:
        for name in order:
            work = {"two": two, "three": three, "four": four, "whole": whole}[name]
            members = tuple(range(work.plan.world_size))
            work = replace(work, freeze_plans=plans)
            ended = group.train(work, members, step=step, sources=sources, regroup_by=0)
            assert parted(ended) == {step + 1}
            step, _, sources = group.finish_commit()
        ended = group.train(replace(four, freeze_plans=plans), (3, 1, 2, 0), step=step, sources=sources)
        assert state_sha256(ended) == expected
    assert_same_statistics(statistics(config), statistics(quiet), method)
