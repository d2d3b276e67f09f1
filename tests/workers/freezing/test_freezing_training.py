"""Training with freezing has the bits of a plain loop with the same masks, for any partition and stops."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from reference import train_plainly
from test_engine_bits import losses, real_config
from torch import nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from orchestrator.events.types import Record
from planner.freezing import FreezePlan
from workers.checkpoint.folder import checkpoints
from workers.config import FreezeConfig, WorkerConfig
from workers.launch.ranks import LaunchedJob, LaunchedRun, run_processes
from workers.protocol.reports import FreezeReport, FreezeStarted, FrozenCounts, StepReport, TimelineReport
from workers.reproducibility import rng

PHASES = {"warm_up": 1, "monitoring": 3, "ramp": 6}
TIMELY = FreezeConfig(method="timelyfreeze", r_max=0.8, **PHASES)
METHODS = {
    "timelyfreeze": TIMELY,
    # Thresholds at which some of these small models' parameters become stable within a few steps.
    "apf": FreezeConfig(method="apf", warm_up=1, check_every=1, apf_threshold=0.8, apf_alpha=0.5),
    "autofreeze": FreezeConfig(method="autofreeze", warm_up=1, check_every=1, autofreeze_percentile=60),
    "timelyfreeze+apf": FreezeConfig(
        method="timelyfreeze+apf", r_max=0.8, **PHASES, check_every=1, apf_threshold=0.8, apf_alpha=0.5
    ),
    "timelyfreeze+autofreeze": FreezeConfig(
        method="timelyfreeze+autofreeze", r_max=0.8, **PHASES, check_every=1, autofreeze_percentile=60
    ),
}
RATIOS = tuple(tuple(((3 * layer + 5 * m) % 7) / 6 for m in range(4)) for layer in range(8))
FIRST = FreezePlan(epoch=1, version=1, ratios=RATIOS, stages=((0, 3), (3, 8)), start=4)
SECOND = FreezePlan(epoch=1, version=2, ratios=tuple(reversed(RATIOS)), stages=((0, 5), (5, 8)), start=7)
SHAPES = [
    {"ranks": 1},
    {"ranks": 4, "schedule": "zb-h1", "counts": (2, 3, 1, 2)},
    {"ranks": 2, "schedule": "1f1b", "counts": (5, 3), "recompute": True},
    {"ranks": 2, "schedule": "zbv"},
]


def frozen_by_plan(step: int, microbatch: int, name: str, module: nn.Module) -> Collection[str]:
    """What `FIRST` and `SECOND` freeze, from the definitions: keyed draws below AFR (eq. 9)."""
    names = sorted(key for key, _ in module.named_parameters())
    if step <= 1:  # upper-bound monitoring is (1 + 3) // 2 = 2
        return ()
    if step == 2:
        return ()
    if step == 3:
        return names
    plan = FIRST if step < 7 else SECOND
    ratio = plan.ratios[int(name.removeprefix("l"))][microbatch] * min(1.0, (step - 3) / 3)
    numbers = rng.uniforms(len(names), 3, "freeze", step, microbatch, name)
    return [key for key, number in zip(names, numbers, strict=True) if number < ratio]


def frozen_job(config: WorkerConfig, **fields: object) -> LaunchedJob:
    plans = (FIRST, SECOND) if config.freeze.timely else ()
    return job(config, freeze_plans=plans, **fields)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "trait", ["plain", "dropout", "two-outputs", "transposed", "batchnorm", "raw-matrix", "attention"]
)
@pytest.mark.parametrize("shape", [*SHAPES[1:], SHAPES[0]])
def test_the_bits_are_those_of_a_plain_loop_that_throws_the_frozen_gradients_away(
    tmp_path: Path, trait: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, trait, steps=9, freeze=TIMELY)
    expected, expected_losses = train_plainly(
        config, tmp_path, boundaries=trait == "transposed", frozen=frozen_by_plan
    )
    free, _ = train_plainly(config, tmp_path, boundaries=trait == "transposed")
    assert expected != free
    run = run_threads(frozen_job(config, **shape))
    assert run.state_sha256 == expected
    assert losses(run) == expected_losses


@pytest.mark.each_choice
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trait", ["tied", "twice"])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_every_method_gives_the_same_bits_on_any_partition(
    tmp_path: Path, method: str, trait: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, trait, steps=9, freeze=METHODS[method])
    runs = [run_threads(frozen_job(config, **each)) for each in (SHAPES[0], shape)]
    assert len({run.state_sha256 for run in runs}) == 1
    assert runs[0].state_sha256 != run_threads(job(small_config(tmp_path, trait, steps=9))).state_sha256
    steps = [[r for r in run.reports if isinstance(r, StepReport)] for run in runs]
    for name in ("loss", "grad_norm", "gradient_energy", "effective_update"):
        assert len({tuple(getattr(step, name) for step in one) for one in steps}) == 1, name


@pytest.mark.parametrize(
    "method", ["timelyfreeze+apf", pytest.param("timelyfreeze+autofreeze", marks=pytest.mark.soak)]
)
def test_processes_and_replicas_give_the_same_bits(tmp_path: Path, method: str) -> None:
    config = small_config(tmp_path, "batchnorm", steps=8, microbatches=4, freeze=METHODS[method])
    threads = run_threads(frozen_job(config, ranks=2, schedule="1f1b"))
    processes = run_processes(frozen_job(config, ranks=2, schedule="zb-h1", counts=(3, 5)))
    assert processes.state_sha256 == threads.state_sha256
    doubled = small_config(tmp_path, "batchnorm", steps=8, replicas=2, freeze=METHODS[method])
    one = run_threads(frozen_job(doubled, ranks=1))
    two = run_threads(frozen_job(doubled, ranks=2, schedule="1f1b"))
    assert one.state_sha256 == two.state_sha256
    for run, ranks in ((one, 1), (two, 2)):
        for outcome in run.outcomes:
            assert outcome.layer_digests == run.outcomes[outcome.rank % ranks].layer_digests


# In the warm-up, in monitoring, in the ramp of the first plan, and under the second.
@pytest.mark.each_choice
@pytest.mark.parametrize("method", ["timelyfreeze+apf", "apf", "timelyfreeze+autofreeze"])
@pytest.mark.parametrize(
    "stop_at", [3, 1, 5, 8, *(pytest.param(step, marks=pytest.mark.soak) for step in (2, 4, 6, 7))]
)
def test_stop_and_resume_at_any_step_in_any_phase(tmp_path: Path, method: str, stop_at: int) -> None:
    config = small_config(tmp_path / "quiet", "batchnorm", steps=9, freeze=METHODS[method])
    expected = run_threads(frozen_job(config, ranks=2, schedule="1f1b"))
    again = changed(config, output=str(tmp_path / "stopped"))
    first, second = SHAPES[stop_at % 3], SHAPES[(stop_at + 1) % 3]
    stopped = run_threads(frozen_job(again, stop_at=stop_at, **first))
    (newest,) = checkpoints(again.job.folder)
    assert newest.step == stop_at
    resumed = run_threads(frozen_job(again, start=newest, generation=2, **second))
    assert resumed.state_sha256 == expected.state_sha256
    assert steps_of(stopped) + steps_of(resumed) == steps_of(expected)


def steps_of(run: LaunchedRun) -> list[tuple[float, ...]]:
    return [
        (r.loss, r.grad_norm, r.gradient_energy, r.effective_update)
        for r in run.reports
        if isinstance(r, StepReport)
    ]


def test_a_plan_taken_up_while_training_is_replayed_to_the_bit_from_its_recorded_start(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "dropout", steps=9, freeze=TIMELY)
    plan = FreezePlan(epoch=1, version=1, ratios=RATIOS)
    # Each rank prepares it at its own moment, after it has reported the last step of monitoring.
    live = run_threads(job(config, ranks=4, schedule="1f1b", prepare=((3, plan),)))
    (started,) = (r.plan for r in live.reports if isinstance(r, FreezeStarted))
    assert started.start is not None
    assert 4 <= started.start <= 6
    for shape in SHAPES[1:3]:
        replayed = run_threads(job(config, freeze_plans=(started,), **shape))
        assert replayed.state_sha256 == live.state_sha256, shape
    other = run_threads(
        job(config, freeze_plans=(FreezePlan(epoch=1, version=1, ratios=RATIOS, start=8),), ranks=1)
    )
    assert other.state_sha256 != live.state_sha256


def test_gpt_tied_and_vit_give_the_same_bits_on_any_partition(tmp_path: Path) -> None:
    for name in ("gpt-tied", "vit"):
        config = real_config(tmp_path, name, steps=7, freeze=TIMELY)
        expected = run_threads(frozen_job(config, ranks=1))
        run = run_threads(frozen_job(config, ranks=2, schedule="zb-h1", recompute=True))
        assert run.state_sha256 == expected.state_sha256


def test_what_is_reported_of_freezing(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=9, freeze=TIMELY)
    run = run_threads(frozen_job(config, ranks=2, schedule="1f1b", counts=(3, 5)))
    timelines = {(r.step, r.rank) for r in run.reports if isinstance(r, TimelineReport)}
    assert timelines == {(step, rank) for step in (2, 3, 9) for rank in (0, 1)}
    reports = {(r.step, r.rank): r.actions for r in run.reports if isinstance(r, FreezeReport)}
    assert reports.keys() == {(step, rank) for step in range(3, 10) for rank in (0, 1)}
    matrices = {"up.weight": 24 * 48, "down.weight": 24 * 48, "linear.weight": 24 * 5}
    scalars = {**matrices, "up.bias": 48, "norm.weight": 24, "norm.bias": 24, "linear.bias": 5}
    counts = dict.fromkeys([(layer, name) for layer in range(8) for name in names_of(layer)], 0)
    for step in range(3, 10):
        share = min(1.0, (step - 3) / 3)
        for rank, layers in ((0, range(3)), (1, range(3, 8))):
            actions = reports[step, rank]
            assert [(a.stage, a.microbatch) for a in actions] == [(rank, m) for m in range(4)]
            for action in actions:
                frozen = {layer: frozen_names(step, action.microbatch, layer) for layer in layers}
                for layer, names in frozen.items():
                    for name in names:
                        counts[layer, name] += 1
                weight = {layer: sum(matrices.get(n, 0) for n in names_of(layer)) for layer in layers}
                ratios = (FIRST if step < 7 else SECOND).ratios
                planned = (
                    1.0
                    if step == 3
                    else sum(weight[layer] * ratios[layer][action.microbatch] * share for layer in layers)
                    / sum(weight.values())
                )
                assert action.planned == pytest.approx(planned)
                drawn = sum(matrices.get(n, 0) for names in frozen.values() for n in names)
                assert action.actual == pytest.approx(drawn / sum(weight.values()))
                held = sum(scalars[n] for layer in layers for n in names_of(layer))
                left = sum(scalars[n] for names in frozen.values() for n in names)
                assert action.parameters == pytest.approx(left / held)
    of_steps = dict.fromkeys(counts, 0)
    for report in (r for r in run.reports if isinstance(r, FreezeReport)):
        assert report.passes == 4
        for layer, frozen in report.counts:
            for name, count in zip(names_of(layer), frozen, strict=True):
                of_steps[layer, name] += count
    assert of_steps == counts
    told = sorted((r for r in run.reports if isinstance(r, FrozenCounts)), key=lambda r: r.rank)
    assert [(r.step, r.passes) for r in told] == [(9, 36), (9, 36)]
    assert {(layer, name): count for r in told for layer, name, count in r.counts} == counts


def names_of(layer: int) -> list[str]:
    if layer == 7:
        return ["linear.bias", "linear.weight"]
    return ["down.weight", "norm.bias", "norm.weight", "up.bias", "up.weight"]


def frozen_names(step: int, microbatch: int, layer: int) -> Collection[str]:
    module = nn.Module()
    for name in names_of(layer):
        module.register_parameter(name.replace(".", "_"), nn.Parameter(nn.Parameter().data))
    place = {name.replace(".", "_"): name for name in names_of(layer)}
    return [place[key] for key in frozen_by_plan(step, microbatch, f"l{layer}", module)]


def test_without_freezing_nothing_is_said_of_it(tmp_path: Path) -> None:
    run = run_threads(job(small_config(tmp_path)))
    assert not any(isinstance(r, FreezeReport | FreezeStarted | FrozenCounts) for r in run.reports)
    for step in (r for r in run.reports if isinstance(r, StepReport)):
        assert step.gradient_energy == pytest.approx(step.grad_norm**2)
        assert step.effective_update == 1.0


def test_effective_update_is_the_ratios_complement_where_all_have_one_ratio(tmp_path: Path) -> None:
    even = FreezePlan(epoch=1, version=1, ratios=((0.25, 0.75, 0.0, 1.0),) * 8, start=4)
    config = small_config(tmp_path, steps=9, freeze=TIMELY)
    run = run_threads(job(config, ranks=2, schedule="1f1b", freeze_plans=(even,)))
    steps = [r for r in run.reports if isinstance(r, StepReport)]
    assert [s.effective_update for s in steps[:3]] == [1.0, 1.0, 0.0]
    assert [s.effective_update for s in steps[3:]] == pytest.approx([1 - 0.5 / 3, 1 - 1 / 3] + [0.5] * 4)
    # While everything is frozen the last known energy stands.
    assert steps[2].gradient_energy == steps[1].gradient_energy == pytest.approx(steps[1].grad_norm ** 2)


def test_frozen_in_every_microbatch_is_no_update_at_all(tmp_path: Path) -> None:
    ratios = tuple((1.0,) * 4 if layer == 2 else (0.0,) * 4 for layer in range(8))
    plan = FreezePlan(epoch=1, version=1, ratios=ratios, start=4)
    config = small_config(
        tmp_path,
        steps=9,
        freeze=FreezeConfig(method="timelyfreeze", r_max=0.8, warm_up=0, monitoring=2, ramp=3),
    )
    done = {}
    for stop_at in (3, 8):
        output = changed(config, output=str(tmp_path / str(stop_at)))
        run = run_threads(job(output, ranks=2, schedule="1f1b", freeze_plans=(plan,), stop_at=stop_at))
        done[stop_at] = {layer: text for outcome in run.outcomes for layer, text in outcome.layer_digests}
    assert {layer for layer in range(8) if done[3][layer] == done[8][layer]} == {2}


def test_replicas_freeze_what_as_many_microbatches_of_one_pipeline_do(tmp_path: Path) -> None:
    told = []
    for replicas, microbatches in ((1, 4), (4, 1)):
        config = small_config(tmp_path, steps=9, freeze=TIMELY, replicas=replicas, microbatches=microbatches)
        plan = FreezePlan(epoch=1, version=1, ratios=((0.7,) * microbatches,) * 8, start=4)
        steps = steps_of(run_threads(job(config, freeze_plans=(plan,))))
        told.append([number for step in steps for number in step])
    assert told[0] == pytest.approx(told[1], rel=1e-5)


@pytest.mark.parametrize("method", ["timelyfreeze+apf", "timelyfreeze+autofreeze"])
def test_a_hybrid_freezes_as_much_as_was_planned(tmp_path: Path, method: str) -> None:
    config = small_config(tmp_path, steps=12, freeze=METHODS[method])
    run = run_threads(job(config, ranks=2, schedule="1f1b", counts=(3, 5), freeze_plans=(FIRST,)))
    weights = [2 * 24 * 48] * 7 + [24 * 5]
    reports = [r for r in run.reports if isinstance(r, FreezeReport) and r.step > 3]
    assert sorted((r.step, r.rank) for r in reports) == [
        (step, rank) for step in range(4, 13) for rank in (0, 1)
    ]
    for report in reports:
        share = min(1.0, (report.step - 3) / 3)
        for action in report.actions:
            layers = range(*FIRST.stages[action.stage])
            budget = sum(weights[layer] * RATIOS[layer][action.microbatch] for layer in layers)
            assert action.planned == pytest.approx(share * budget / sum(weights[layer] for layer in layers))


@pytest.mark.parametrize("method", ["timelyfreeze+apf", "timelyfreeze+autofreeze"])
def test_a_resumed_hybrid_knows_what_was_stable_on_other_ranks(tmp_path: Path, method: str) -> None:
    freeze = METHODS[method].model_copy(update={"check_every": 2})
    config = small_config(tmp_path / "quiet", steps=14, freeze=freeze)
    plan = FreezePlan(epoch=1, version=1, ratios=((0.5,) * 4,) * 8, stages=((0, 8),), start=4)
    shape = {"ranks": 2, "schedule": "1f1b", "freeze_plans": (plan,)}
    expected = run_threads(job(config, **shape))
    again = changed(config, output=str(tmp_path / "stopped"))
    # Checks happen at every even step; the stopped run's last check decides the next two steps.
    stopped = run_threads(job(again, stop_at=12, **shape))
    resumed = run_threads(job(again, start=checkpoints(again.job.folder)[0], generation=2, **shape))
    assert resumed.state_sha256 == expected.state_sha256
    assert steps_of(stopped) + steps_of(resumed) == steps_of(expected)


TIMES = tuple(
    (("up.weight", 100_000 * (layer + 1)), ("down.weight", 7_000)) if layer < 7 else (("linear.weight", 50),)
    for layer in range(8)
)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "method",
    ["timelyfreeze", "timelyfreeze+apf", pytest.param("timelyfreeze+autofreeze", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("shape", [*SHAPES[1:3], pytest.param(SHAPES[0], marks=pytest.mark.soak)])
def test_a_recorded_plan_with_measured_times_is_replayed_to_the_bit(
    tmp_path: Path, method: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, steps=10, freeze=METHODS[method])
    plan = replace(FIRST, weights=TIMES, start=None)
    live = run_threads(job(config, ranks=2, schedule="1f1b", counts=(3, 5), prepare=((3, plan),)))
    (told,) = (r for r in live.reports if isinstance(r, FreezeStarted))
    line = Record(time_s=0.0, event=told).to_json()
    (started,) = (r.plan for r in [Record.from_json(line).event] if isinstance(r, FreezeStarted))
    assert started == replace(plan, start=started.start)
    frozen = frozen_actions(live)
    replayed = run_threads(job(config, freeze_plans=(started,), **shape))
    assert replayed.state_sha256 == live.state_sha256
    again = run_threads(
        job(config, ranks=2, schedule="1f1b", counts=(3, 5), freeze_plans=(started,), generation=2)
    )
    assert frozen_actions(again) == frozen
    # The draws of a method without a metric do not depend on measured times.
    untimed = run_threads(job(config, freeze_plans=(replace(started, weights=()),)))
    assert (untimed.state_sha256 == live.state_sha256) == (method == "timelyfreeze")


def frozen_actions(run: LaunchedRun) -> list[object]:
    reports = [report for report in run.reports if isinstance(report, FreezeReport)]
    return sorted((r.step, r.rank, r.actions, r.counts) for r in reports)  # pyright: ignore


def test_what_is_told_of_freezing_is_told_in_measured_time(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=9, freeze=TIMELY)
    plan = replace(FIRST, weights=TIMES)
    run = run_threads(job(config, ranks=2, schedule="1f1b", counts=(3, 5), freeze_plans=(plan,)))
    times = [dict(row) for row in TIMES]
    for report in (r for r in run.reports if isinstance(r, FreezeReport) and 4 <= r.step < 7):
        layers = range(3) if report.rank == 0 else range(3, 8)
        whole = sum(sum(times[layer].values()) for layer in layers)
        for action in report.actions:
            frozen = {layer: frozen_names(report.step, action.microbatch, layer) for layer in layers}
            drawn = sum(times[layer].get(name, 0) for layer, names in frozen.items() for name in names)
            assert action.actual == pytest.approx(drawn / whole)
            share = (report.step - 3) / 3
            planned = sum(sum(times[layer].values()) * RATIOS[layer][action.microbatch] for layer in layers)
            assert action.planned == pytest.approx(share * planned / whole)
