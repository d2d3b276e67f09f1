"""Freezing apart from numbers: permanently frozen stages, emulated times, statistics, commit records."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import FAMILIES, job, small_config
from reference import train_plainly
from test_engine_bits import losses
from torch import nn

from benchmarks.parts.rank_threads import run_threads
from planner.codec import from_json, to_json
from planner.freezing import FreezePlan
from planner.ir import Action, ActionKind
from planner.schedule.validate import validate
from workers.checkpoint.coordination import manifest_mismatch
from workers.checkpoint.folder import checkpoints, read_layer, read_manifest, write_layer
from workers.checkpoint.manifest import Manifest
from workers.commit.commit import CommitError, CommitRecord, decide
from workers.commit.freezing_scores import UNKNOWN
from workers.config import DataConfig, EmulatedConfig, FreezeConfig, OptimizerConfig
from workers.devices.emulated import EmulatedDevice
from workers.freezing.freezer import begin_statistics
from workers.launch.ranks import LaunchedJob, run_processes
from workers.layers.layer import Layer
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import FreezeReport, StepReport
from workers.state.layer_state import LayerState, host_copy, load_
from workers.state.optim import make_optimizer

GROWING = ("batch", "lr", "frozen_cost")
"""Keys by which the batch may grow."""
APF = FreezeConfig(method="apf", warm_up=1, check_every=2, apf_threshold=0.7, apf_alpha=0.5)


def frozen_prefix(whole: LaunchedJob, stages: int) -> LaunchedJob:
    """`whole` with the layers of the first `stages` stages frozen as a whole, so that these only run forward."""
    programs = tuple(
        tuple(a for a in program if a.kind is ActionKind.FORWARD or a.stage >= stages)
        for program in whole.schedule.programs
    )
    schedule = replace(whole.schedule, programs=programs, frozen_stages=stages)
    validate(schedule)
    freeze = FreezeConfig(method="prefix", prefix=whole.plan.layers[stages][0])
    return replace(whole, config=whole.config.model_copy(update={"freeze": freeze}), schedule=schedule)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.each_choice
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trait", ["plain", "dropout", "raw-matrix"])
def test_no_gradient_goes_into_a_frozen_stage(
    tmp_path: Path, family: str, trait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: set[int] = set()
    kept: set[int] = set()
    original, original_forward = Layer.backward, Layer.forward

    def keeping(self: Layer, inputs, draw_key: int, *, keep: bool, **more):
        kept.update([self.index] if keep else [])
        return original_forward(self, inputs, draw_key, keep=keep, **more)

    def watching(self: Layer, done, grads, *, weights: bool):
        walked.add(self.index)
        gradients = original(self, done, grads, weights=weights)
        # The first layer that trains forms no input gradient, because a frozen stage does not need one.
        assert bool(gradients) == (self.index > first)
        return gradients

    monkeypatch.setattr(Layer, "forward", keeping)
    monkeypatch.setattr(Layer, "backward", watching)
    config = small_config(tmp_path, trait, steps=4)
    whole = job(config, ranks=2, schedule=family, recompute=trait == "dropout")
    for stages in (1, whole.schedule.stages - 1):
        first = whole.plan.layers[stages][0]
        expected, expected_losses = train_plainly(
            config,
            tmp_path,
            frozen=lambda step, m, name, module, first=first: (
                [key for key, _ in module.named_parameters()] if int(name[1:]) < first else []
            ),
        )
        walked.clear()
        kept.clear()
        run = run_threads(frozen_prefix(whole, stages))
        assert walked == set(range(first, 8))
        assert kept == (set() if trait == "dropout" else walked)  # "dropout" recomputes all layers
        assert run.state_sha256 == expected
        assert losses(run) == expected_losses


def test_a_frozen_stage_sends_nothing_back_between_processes(tmp_path: Path) -> None:
    whole = job(small_config(tmp_path, steps=3), ranks=2, schedule="1f1b")
    expected = run_threads(frozen_prefix(whole, 1))
    assert run_processes(frozen_prefix(whole, 1)).state_sha256 == expected.state_sha256


def test_an_emulated_device_spares_the_time_of_what_is_frozen() -> None:
    device = EmulatedDevice(
        {"forward_s": (1.0, 2.0), "input_grad_s": (4.0, 8.0), "weight_grad_s": (16.0, 32.0)}
    )

    def lasts(token: str, *frozen: float) -> float:
        return device.modelled_s(Action.parse(token), (0, 1), frozen)

    assert [lasts(token, 0.25, 1.0) for token in ("0F0", "0R0", "0I0", "0W0", "0B0")] == [3, 3, 12, 12, 24]
    assert [lasts(token) for token in ("0F0", "0R0", "0I0", "0W0", "0B0")] == [3, 3, 12, 48, 60]


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_device_is_told_each_layers_frozen_share(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[tuple[int, int], tuple[float, ...]] = {}
    original = EmulatedDevice.modelled_s

    def watching(self: EmulatedDevice, action: Action, layers, frozen=()) -> float:
        if action.kind in (ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD):
            told[action.stage, action.index] = tuple(frozen)
        return original(self, action, layers, frozen)

    monkeypatch.setattr(EmulatedDevice, "modelled_s", watching)
    ratios = tuple((1.0, 0.0, 1.0, 0.0) if layer in (1, 6) else (0.0,) * 4 for layer in range(8))
    config = small_config(
        tmp_path,
        steps=3,
        device="emulated",
        emulated=EmulatedConfig(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.001),
        freeze=FreezeConfig(method="timelyfreeze", warm_up=0, monitoring=2, ramp=2),
    )
    plan = FreezePlan(epoch=1, version=1, ratios=ratios, start=3)
    run_threads(job(config, ranks=2, schedule=family, freeze_plans=(plan,)))
    shares = {0: (0.0, 1.0, 0.0, 0.0), 1: (0.0, 0.0, 1.0, 0.0)}
    assert told == {(s, m): shares[s] if m % 2 == 0 else (0.0,) * 4 for s in (0, 1) for m in range(4)}


def test_an_emulated_device_spares_the_measured_time_of_what_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: set[float] = set()
    original = EmulatedDevice.modelled_s

    def watching(self: EmulatedDevice, action: Action, layers, frozen=()) -> float:
        if action.kind is ActionKind.BACKWARD and 1 in layers:
            told.add(round(frozen[list(layers).index(1)], 6))
        return original(self, action, layers, frozen)

    monkeypatch.setattr(EmulatedDevice, "modelled_s", watching)
    config = small_config(
        tmp_path,
        steps=12,
        device="emulated",
        emulated=EmulatedConfig(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0001),
        freeze=FreezeConfig(method="timelyfreeze", warm_up=0, monitoring=2, ramp=2),
    )
    times = ((("up.weight", 900), ("down.weight", 100)),) * 7 + ((("linear.weight", 50),),)
    plan = FreezePlan(epoch=1, version=1, ratios=((0.5,) * 4,) * 8, weights=times, start=3)
    run_threads(job(config, ranks=2, schedule="1f1b", freeze_plans=(plan,)))
    # Both matrices have the same number of scalars.
    assert told == {0.0, 0.1, 0.9, 1.0}


def state_of(freeze: FreezeConfig, seed: int = 0) -> LayerState:
    torch.manual_seed(seed)
    state = LayerState.of(0, "l0", nn.Linear(3, 2), make_optimizer(OptimizerConfig(), 4))
    begin_statistics(freeze, state)
    return state


@pytest.mark.parametrize("method", ["timelyfreeze", "apf", "timelyfreeze+autofreeze"])
def test_statistics_are_state_that_copies_loads_and_survives_the_disk(tmp_path: Path, method: str) -> None:
    freeze = APF.model_copy(update={"method": method})
    state = state_of(freeze)
    for number, tensor in enumerate(state.freezing.values()):
        tensor.fill_(number + 1)
    copied = host_copy(state)
    files = write_layer(str(tmp_path), copied)
    assert copied.freezing.keys() == state.freezing.keys()
    assert all(copied.freezing[key].data_ptr() != state.freezing[key].data_ptr() for key in state.freezing)
    manifest = Manifest(
        step=1, generation=1, spec={}, plan={}, layers=("l0",), samples=0, files={f.name: f for f in files}
    )
    read = read_layer(CheckpointRef(path=str(tmp_path), step=1), manifest, 0)
    fresh = state_of(freeze, seed=1)
    load_(fresh, read)
    assert fresh.slots.keys() == state.slots.keys()
    for key, tensor in state.freezing.items():
        assert fresh.freezing[key].dtype == tensor.dtype
        assert torch.equal(fresh.freezing[key], tensor), key


def test_state_without_statistics_loads_as_before_any_check() -> None:
    state = state_of(APF)
    for tensor in state.freezing.values():
        tensor.fill_(1)
    load_(state, state_of(FreezeConfig(), seed=1))
    assert not any(tensor.any() for tensor in state.freezing.values())
    plain = state_of(FreezeConfig())
    load_(plain, state_of(APF))
    assert plain.freezing == {}


def test_a_job_that_freezes_nothing_writes_the_files_it_always_wrote(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    run_threads(job(config))
    (ref,) = checkpoints(config.job.folder)
    assert read_layer(ref, read_manifest(ref), 0).freezing == {}


def test_resuming_with_another_way_to_freeze_is_named() -> None:
    config = small_config(Path("x"), freeze=APF)
    spec = config.model_dump(mode="json")

    def mismatch(spec: dict, now: FreezeConfig) -> set[str]:
        manifest = Manifest(step=1, generation=1, spec=spec, plan={}, layers=(), samples=0, files={})
        return set(manifest_mismatch(manifest, config.model_copy(update={"freeze": now})))

    assert mismatch(spec, APF) == set()
    assert mismatch(spec, APF.model_copy(update={"apf_alpha": 0.75})) == {"freeze.apf_alpha"}
    assert "freeze.method" in mismatch(spec, FreezeConfig())
    old = {key: value for key, value in spec.items() if key != "freeze"}
    assert mismatch(old, FreezeConfig()) == set()
    assert mismatch(old, FreezeConfig(warm_up=7)) == set()
    assert "freeze.method" in mismatch(old, APF)


@pytest.mark.parametrize(
    ("method", "used"),
    [
        ("none", set()),
        ("timelyfreeze", {"r_max", "warm_up", "monitoring", "ramp"}),
        ("apf", {"warm_up", "check_every", "apf_threshold", "apf_alpha"}),
        ("autofreeze", {"warm_up", "check_every", "autofreeze_percentile", "frozen_mode", "thaw", *GROWING}),
        ("pipetransformer", {"warm_up", "check_every", "alpha", "rule", "frozen_mode", "thaw", *GROWING}),
        ("prefix", {"prefix", "schedule", "frozen_mode", "thaw", *GROWING}),
        ("auto", {"warm_up", "monitoring", "ramp", "r_max", "frozen_mode", "thaw", *GROWING}),
        (
            "timelyfreeze+apf",
            {"r_max", "warm_up", "monitoring", "ramp", "check_every", "apf_threshold", "apf_alpha"},
        ),
        (
            "timelyfreeze+autofreeze",
            {"r_max", "warm_up", "monitoring", "ramp", "check_every", "autofreeze_percentile"},
        ),
    ],
)
def test_only_what_a_method_uses_must_be_as_it_was(method: str, used: set[str]) -> None:
    """Otherwise a job could not resume after another method's default has changed."""
    given = {"warm_up": 2, "monitoring": 6, "ramp": 9}
    others = {
        "r_max": 0.25,
        "warm_up": 1,
        "monitoring": 5,
        "ramp": 8,
        "check_every": 7,
        "apf_threshold": 0.125,
        "apf_alpha": 0.75,
        "autofreeze_percentile": 60.0,
        "alpha": 0.5,
        "rule": "authors",
        "prefix": 3,
        "schedule": ((1, 2),),
        "thaw": "rate",
        "frozen_mode": "eval",
        "pack": "off",
        "frozen_cost": 0.5,
        "cache": "off",
        "cache_bytes": 5,
        "cache_disk_bytes": 6,
        "least_update": 0.25,
        "batch": "scale",
        "lr": "sqrt",
    }
    assert {"method", *others} == set(FreezeConfig.model_fields)
    freeze = FreezeConfig.model_validate({"method": method, **given})
    config = small_config(Path("x"), freeze=freeze)
    manifest = Manifest(
        step=1,
        generation=1,
        spec=config.model_dump(mode="json"),
        plan={},
        layers=(),
        samples=0,
        files={},
    )
    now = config.model_copy(update={"freeze": freeze.model_copy(update=others)})
    assert set(manifest_mismatch(manifest, now)) == {f"freeze.{key}" for key in used}


def test_a_bound_of_what_reaches_the_weights_is_used_where_we_say_how_much_is_frozen() -> None:
    keys = [FreezeConfig(method="timelyfreeze", r_max=r_max).used for r_max in ("auto", 0.5)]
    assert keys[0] - keys[1] == {"least_update"}
    assert FreezeConfig(method="apf", r_max="auto").used == FreezeConfig(method="apf").used


def test_the_commit_carries_scores_and_energies_bit_for_bit() -> None:
    sent = [
        CommitRecord(
            rank=0,
            generation=1,
            step=4,
            losses={0: 1.0, 1: 3.0},
            squared_norms={0: 4.0},
            scores={0: 0.1 + 0.2},
            stable={0: 7},
            energies={0: (8.0, 4.0)},
        ),
        CommitRecord(
            rank=1,
            generation=1,
            step=4,
            squared_norms={1: 12.0},
            scores={1: UNKNOWN},
            stable={1: 0},
            energies={1: (24.0, 20.0)},
        ),
    ]
    received = [from_json(CommitRecord, to_json(record)) for record in sent]
    assert received == sent
    decision = decide(received, microbatches=2, layers=2, clip_norm=None, lr=0.1)
    assert decision.scores == {0: 0.1 + 0.2, 1: UNKNOWN}
    assert decision.stable == {0: 7, 1: 0}
    assert decision.gradient_energy == 32.0 / 4
    assert decision.effective_update == 24.0 / 32.0
    # The norm is that of the gradient that freezing left.
    assert decision.grad_norm == 4.0 / 2


def of_shard(rank: int, **found: object) -> CommitRecord:
    losses = {0: 1.0} if rank == 0 else {}
    return CommitRecord(rank=rank, generation=1, step=4, losses=losses, **found)  # pyright: ignore


def test_the_commit_puts_together_what_shards_found_as_the_whole_layer_would() -> None:
    """Of three shards, one has no parameters. In name order, sums have other bits than in the order of shards."""
    tenths = {"b": (0.2, 0.02), "c": (0.3, 0.03)}, {"a": (0.1, 0.01)}, dict[str, tuple[float, float]]()
    norms = [{name: energy for name, (energy, _) in shard.items()} for shard in tenths]
    received = [
        from_json(
            CommitRecord,
            to_json(
                of_shard(
                    rank,
                    parameter_norms={0: norms[rank]},
                    parameter_energies={0: tenths[rank]},
                    moves={} if rank == 2 else {0: tenths[rank]},
                    scores={0: 0.0} if rank == 2 else {},
                    stable={0: (0b110, 0b001, 0)[rank]},
                )
            ),
        )
        for rank in range(3)
    ]
    decision = decide(received, microbatches=1, layers=1, clip_norm=None, lr=0.1, shards=3)
    squares = (0.1 + 0.2) + 0.3
    assert squares != (0.2 + 0.3) + 0.1
    assert decision.grad_norm == math.sqrt(squares)
    assert decision.gradient_energy == squares
    assert decision.effective_update == ((0.01 + 0.02) + 0.03) / squares
    before, now = math.sqrt(squares), math.sqrt((0.01 + 0.02) + 0.03)
    assert decision.scores == {0: abs(before - now) / before}
    assert decision.stable == {0: 0b111}
    lacking = [*received[:2], replace(received[2], parameter_energies={})]
    with pytest.raises(CommitError, match="commit 4 has energies of 2 of 3 shards of layer 0"):
        decide(lacking, microbatches=1, layers=1, clip_norm=None, lr=0.1, shards=3)
    still = [of_shard(rank, parameter_norms={0: norms[rank]}, scores={0: 0.0}) for rank in range(3)]
    assert decide(still, microbatches=1, layers=1, clip_norm=None, lr=0.1, shards=3).scores == {0: 0.0}


def test_apf_calls_biases_stable_too_and_says_so(tmp_path: Path) -> None:
    """A mask without a matrix saves no time, but it is freezing and is reported."""
    run = run_threads(job(small_config(tmp_path, steps=16, freeze=APF), ranks=2, schedule="1f1b"))
    reports = [r for r in run.reports if isinstance(r, FreezeReport)]
    # There are reports even for steps in which a rank freezes nothing, because averages are over all ranks.
    assert [(r.step, r.rank) for r in sorted(reports, key=lambda r: (r.step, r.rank))] == [
        (step, rank) for step in range(2, 17) for rank in (0, 1)
    ]
    assert any(not any(a.parameters for a in r.actions) for r in reports)
    actions = [a for r in reports for a in r.actions]
    assert any(a.actual == 0.0 and a.parameters > 0.0 for a in actions)
    assert all(a.planned == a.actual for a in actions)


def test_a_step_whose_norm_is_not_finite_is_no_estimate_of_the_gradients_energy(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        steps=6,
        data=DataConfig(source="test_engine_conduct:PoisonedVectors"),
        freeze=FreezeConfig(method="timelyfreeze", warm_up=0, monitoring=2, ramp=2),
    )
    plans = tuple(
        FreezePlan(epoch=1, version=start, ratios=((ratio,) * 4,) * 8, start=start)
        for start, ratio in ((3, 0.0), (5, 1.0))
    )
    run = run_threads(job(config, ranks=2, schedule="1f1b", freeze_plans=plans))
    steps = {r.step: r for r in run.reports if isinstance(r, StepReport)}
    assert [step for step, report in steps.items() if report.skipped] == [4]
    assert steps[4].effective_update == 1.0
    assert steps[5].gradient_energy == steps[6].gradient_energy == steps[3].gradient_energy > 0.0
