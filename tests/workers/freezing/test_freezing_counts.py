"""How often each parameter was frozen over a run: as if undisturbed, whichever rank held a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job
from rank_group import RankGroup, state_sha256, with_standbys
from test_migration import ENDLESS, follow, moving
from test_standby import configured

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from orchestrator.history.frozen_counts import CountedSteps, ParameterCounts
from workers.checkpoint.folder import checkpoints
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob, LaunchedRun
from workers.protocol.reports import FreezeReport, FrozenCounts, Report, StepReport

MICROBATCHES = 4


def counted(reports: Sequence[Report], steps: int) -> ParameterCounts:
    told = CountedSteps()
    for report in reports:
        if isinstance(report, FreezeReport):
            assert told.fold(report)
    told.take_back(steps)
    whole = told.add_up(steps, lambda steps: steps * MICROBATCHES)
    assert whole is not None
    return whole


def frozen(told: ParameterCounts) -> dict[int, tuple[int, ...]]:
    return {layer: tuple(known.counts) for layer, known in told.layers.items()}


def undisturbed(run: LaunchedRun) -> dict[int, tuple[int, ...]]:
    """The counts of ranks that are never disturbed."""
    counts: dict[int, list[int]] = defaultdict(list)
    for report in run.reports:
        if isinstance(report, FrozenCounts):
            for layer, _, count in report.counts:
                counts[layer].append(count)
    return {layer: tuple(of_layer) for layer, of_layer in counts.items()}


def stopped_at(work: LaunchedJob, step: int) -> LaunchedRun:
    return run_threads(replace(work, stop_at=step))


@pytest.mark.parametrize("method", ["timelyfreeze", "apf", "timelyfreeze+apf"])
def test_layers_that_change_ranks_keep_their_counts(tmp_path: Path, method: str) -> None:
    config, about = configured(tmp_path, method)
    config = changed(config, steps=ENDLESS)
    three = job(config, ranks=3, schedule="zb-h1", counts=(3, 3, 2), **about)
    with RankGroup(config, 3) as group:

        def move() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) and r.step == 5 for r in reports))
            copying, taking = moving(three, (1, 5, 2))
            follow(group, three, range(3), copying)
            follow(group, three, range(3), taking)
            switched = max(group.steps())
            group.wait_for(
                lambda reports: any(isinstance(r, StepReport) and r.step > switched + 2 for r in reports)
            )
            group.stop()

        ended = group.train(three, range(3), plan=with_standbys(three), meanwhile=move)
        step = ended[0].step
        quiet = stopped_at(job(config, **about), step)
        assert state_sha256(ended) == quiet.state_sha256
        told = counted(group.of(FreezeReport), step)
        assert frozen(told) == undisturbed(quiet)
        assert {known.passes for known in told.layers.values()} == {MICROBATCHES * step}
        assert (told.whole, told.steps) == (step, step)
        assert [told.layers[layer].rank for layer in range(8)] == [0, 1, 1, 1, 1, 1, 2, 2]
        # Each rank's own counts start over with each plan.
        assert max(report.passes for report in group.of(FrozenCounts)) < MICROBATCHES * step


def test_what_a_killed_rank_had_told_stays_counted(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "timelyfreeze")
    config = changed(config, steps=12)
    three = job(config, ranks=3, schedule="1f1b", counts=(3, 3, 2), **about)
    quiet = run_threads(job(config, **about))
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=8, phase=FaultPhase.BACKWARD))
        group.train(three, range(3), plan=with_standbys(three))
        step, _, sources = group.finish_commit()
        assert step == 7
        two = job(config, ranks=2, schedule="1f1b", counts=(4, 4), **about)
        ended = group.train(two, (0, 2), step=step, sources=sources)
        assert state_sha256(ended) == quiet.state_sha256
        told = counted(group.of(FreezeReport), 12)
    expected = undisturbed(quiet)
    survived = [*range(3), 6, 7]
    assert {layer: frozen(told)[layer] for layer in survived} == {
        layer: expected[layer] for layer in survived
    }
    assert {told.layers[layer].passes for layer in survived} == {12 * MICROBATCHES}
    # Rank 1 would have reported what it froze in step 7 at the end of the window in which it died.
    assert (told.whole, told.steps) == (11, 12)
    assert {told.layers[layer].passes for layer in (3, 4, 5)} == {11 * MICROBATCHES}


@pytest.mark.parametrize("method", ["timelyfreeze", "timelyfreeze+apf"])
def test_a_resumed_run_goes_on_counting(tmp_path: Path, method: str) -> None:
    config, about = configured(tmp_path, method)
    quiet = run_threads(job(config, **about))
    first = stopped_at(job(config, ranks=2, schedule="1f1b", **about), 5)
    start = next(ref for ref in checkpoints(config.job.folder) if ref.step == 5)
    second = run_threads(job(config, ranks=1, start=start, generation=2, **about))
    told = counted([*first.reports, *second.reports], config.job.steps)
    assert told.whole == config.job.steps
    assert frozen(told) == undisturbed(quiet)


def report(step: int, rank: int, *counts: tuple[int, tuple[int, ...]], passes: int = 4) -> FreezeReport:
    return FreezeReport(step=step, rank=rank, actions=(), passes=passes, counts=counts)


def test_steps_that_nobody_told_of_count_from_when_on_anything_may_be_frozen() -> None:
    told = CountedSteps()
    assert told.add_up(8, lambda steps: 4 * steps) is None
    told.fold(report(3, 0, (0, (1, 2))))
    told.fold(report(3, 1, (1, (4,))))
    assert not told.fold(report(3, 1, (1, (4,))))
    told.fold(report(4, 0, (0, (0, 3))))
    told.fold(report(6, 0, (0, (0, 0)), (1, (2,))))
    whole = told.add_up(6, lambda steps: 4 * steps)
    assert whole is not None
    # Steps 1 and 2 came before freezing; layer 1 lacks steps 4 and 5, layer 0 step 5.
    assert {layer: (known.rank, known.passes, known.counts) for layer, known in whole.layers.items()} == {
        0: (0, 20, [1, 5]),
        1: (0, 16, [6]),
    }
    assert (whole.whole, whole.steps) == (4, 6)
    told.take_back(3)
    voided = told.add_up(3, lambda steps: 4 * steps)
    assert voided is not None
    assert (frozen(voided), voided.whole) == ({0: (1, 2), 1: (4,)}, 3)


def test_pipelines_of_replicas_add_up() -> None:
    told = CountedSteps()
    told.fold(report(1, 0, (0, (1,))))
    told.fold(report(1, 2, (0, (3,))))
    both = told.add_up(1, lambda steps: 8 * steps)
    assert both is not None
    assert (both.layers[0].rank, both.layers[0].passes, both.layers[0].counts, both.whole) == (0, 8, [4], 1)
