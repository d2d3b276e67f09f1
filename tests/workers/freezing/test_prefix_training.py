"""Layers frozen as a whole, from the input up: the bits of a plain loop, on any partition, and nothing goes back."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256, with_standbys
from reference import train_plainly
from test_engine_bits import losses, real_config
from torch import nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.freezing import FreezeOverrides, FreezePlan
from workers.checkpoint.folder import checkpoints, read_manifest
from workers.config import FreezeConfig, OptimizerConfig
from workers.copies.redundancy import Shipping
from workers.fault_injection.points import FaultPhase
from workers.launch.ranks import LaunchedRun, run_processes
from workers.layers.layer import Layer
from workers.layers.sharded_weights import WeightExchange
from workers.protocol.reports import FreezeReport, PrefixFrozen, StepReport
from workers.transport.channel import MessageStream

SCHEDULE = ((2, 3), (4, 6), (6, 2), (8, 0))
"""Freezing, more of it, less, none."""
BY_HAND = FreezeConfig(method="prefix", schedule=SCHEDULE)
METHODS = {
    "by hand": BY_HAND,
    "paper": FreezeConfig(method="pipetransformer", warm_up=1, check_every=2, alpha=0.5),
    "authors": FreezeConfig(method="pipetransformer", warm_up=0, check_every=2, alpha=0.5, rule="authors"),
    "autofreeze": FreezeConfig(method="autofreeze", warm_up=1, check_every=1, autofreeze_percentile=60),
}
SHAPES = [
    {"ranks": 1},
    {"ranks": 4, "schedule": "zb-h1", "counts": (2, 3, 1, 2)},
    {"ranks": 2, "schedule": "1f1b", "counts": (5, 3), "recompute": True},
    {"ranks": 2, "schedule": "zbv"},
    {"ranks": 3, "schedule": "gpipe", "counts": (3, 3, 2)},
    {"ranks": 2, "schedule": "interleaved"},
]


def frozen_by_hand(step: int, microbatch: int, name: str, module: nn.Module) -> Collection[str]:
    layers = [layers for first, layers in SCHEDULE if first <= step]
    below = int(name.removeprefix("l")) < (layers[-1] if layers else 0)
    return [key for key, _ in module.named_parameters()] if below else ()


def prefixes(run: LaunchedRun) -> list[tuple[int, int]]:
    return [(r.step, r.layers) for r in run.reports if isinstance(r, PrefixFrozen)]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "trait",
    ["plain", "dropout", "two-outputs", "transposed", "batchnorm", "raw-matrix", "attention", "twice"],
)
@pytest.mark.parametrize("shape", [*SHAPES[1:], SHAPES[0]])
def test_the_bits_are_those_of_a_plain_loop_that_throws_the_gradients_below_away(
    tmp_path: Path, trait: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, trait, steps=9, freeze=BY_HAND)
    boundaries = trait == "transposed"
    expected, expected_losses = train_plainly(config, tmp_path, boundaries=boundaries, frozen=frozen_by_hand)
    assert expected != train_plainly(config, tmp_path, boundaries=boundaries)[0]
    run = run_threads(job(config, **shape))
    assert run.state_sha256 == expected
    assert losses(run) == expected_losses
    assert prefixes(run) == list(SCHEDULE)


@pytest.mark.each_choice
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast", "float16"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_in_16_bits_too(tmp_path: Path, precision: str, shape: dict[str, Any]) -> None:
    config = small_config(tmp_path, steps=9, freeze=BY_HAND, precision=precision)
    expected, _ = train_plainly(config, tmp_path, frozen=frozen_by_hand)
    assert run_threads(job(config, **shape)).state_sha256 == expected


@pytest.mark.each_choice
@pytest.mark.parametrize("rule", METHODS)
@pytest.mark.parametrize("trait", ["tied", "plain"])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_every_rule_finds_one_prefix_on_every_partition(
    tmp_path: Path, rule: str, trait: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, trait, steps=9, freeze=METHODS[rule])
    runs = [run_threads(job(config, **each)) for each in (SHAPES[0], shape)]
    assert len({run.state_sha256 for run in runs}) == 1
    (found,) = {tuple(prefixes(run)) for run in runs}
    assert found, "it froze nothing"
    assert runs[0].state_sha256 != run_threads(job(small_config(tmp_path, trait, steps=9))).state_sha256
    steps = [[r for r in run.reports if isinstance(r, StepReport)] for run in runs]
    for name in ("loss", "grad_norm", "gradient_energy", "effective_update"):
        assert len({tuple(getattr(step, name) for step in one) for one in steps}) == 1, name


@pytest.mark.parametrize("trait", ["dropout", "batchnorm"])
def test_the_mode_of_frozen_layers_is_part_of_the_trajectory(tmp_path: Path, trait: str) -> None:
    found = []
    for mode, shape in (("train", SHAPES[1]), ("eval", SHAPES[2])):
        freeze = BY_HAND.model_copy(update={"frozen_mode": mode})
        config = small_config(tmp_path, trait, steps=7, freeze=freeze)
        one, other = (run_threads(job(config, **each)).state_sha256 for each in (SHAPES[0], shape))
        assert one == other, mode
        found.append(one)
    assert found[0] != found[1]


# Which layers a rule finds on each partition is tested above.
@pytest.mark.parametrize(
    "rule",
    ["by hand", "paper", *(pytest.param(rule, marks=pytest.mark.soak) for rule in ("authors", "autofreeze"))],
)
def test_replicas_and_processes_have_the_same_bits(tmp_path: Path, rule: str) -> None:
    config = small_config(tmp_path, steps=9, replicas=2, freeze=METHODS[rule])
    one = run_threads(job(config, ranks=1))
    two = run_processes(job(config, ranks=2, schedule="zb-h1", counts=(3, 5)))
    assert two.state_sha256 == one.state_sha256
    assert prefixes(two) == prefixes(one) != []


@pytest.mark.each_choice
@pytest.mark.parametrize("rule", METHODS)
@pytest.mark.parametrize(
    "stop_at", [1, 3, 5, 8, *(pytest.param(step, marks=pytest.mark.soak) for step in (2, 4, 6, 7))]
)
def test_stop_and_resume_at_any_step(tmp_path: Path, rule: str, stop_at: int) -> None:
    config = small_config(tmp_path / "quiet", "batchnorm", steps=9, freeze=METHODS[rule])
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    again = changed(config, output=str(tmp_path / "stopped"))
    first, second = SHAPES[stop_at % 3], SHAPES[(stop_at + 1) % 3]
    stopped = run_threads(job(again, stop_at=stop_at, **first))
    (newest,) = checkpoints(again.job.folder)
    assert read_manifest(newest).carried.prefix.layers == ([0, *prefixes_by_step(expected)][stop_at])
    resumed = run_threads(job(again, start=newest, generation=2, **second))
    assert resumed.state_sha256 == expected.state_sha256
    assert prefixes(stopped) + prefixes(resumed) == prefixes(expected)


def test_another_alpha_holds_from_its_step_on_on_every_partition(tmp_path: Path) -> None:
    rule = FreezeConfig(method="pipetransformer", warm_up=1, check_every=2, alpha=0.2)
    config = small_config(tmp_path, steps=9, freeze=rule)
    asked = FreezeOverrides(method="pipetransformer", r_max="auto", alpha=0.9)
    plan = FreezePlan(epoch=1, version=1, ratios=((0.0,) * 4,) * 8, control=asked, start=5)
    runs = [run_threads(job(config, freeze_plans=(plan,), **shape)) for shape in SHAPES[:3]]
    assert len({run.state_sha256 for run in runs}) == 1
    (found,) = {tuple(prefixes(run)) for run in runs}
    small = prefixes(run_threads(job(config)))
    assert [each for each in found if each[0] <= 5] == [each for each in small if each[0] <= 5]
    assert found[-1][1] > small[-1][1]


def prefixes_by_step(run: LaunchedRun) -> list[int]:
    """The prefix of each step from the second on."""
    found = dict(prefixes(run))
    now, by_step = 0, list[int]()
    for step in range(2, 11):
        now = found.get(step, now)
        by_step.append(now)
    return by_step


def test_frozen_layers_go_forward_only_and_the_first_above_forms_no_input_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back: list[tuple[int, int]] = []
    walk = Layer.backward

    def seen(layer: Layer, done, grads, *, weights: bool):
        found = walk(layer, done, grads, weights=weights)
        back.append((layer.index, len(found)))
        return found

    monkeypatch.setattr(Layer, "backward", seen)
    config = small_config(tmp_path, steps=3, freeze=FreezeConfig(method="prefix", prefix=5))
    run = run_threads(job(config, ranks=4, schedule="1f1b", counts=(2, 2, 2, 2)))
    assert {*back} == {(7, 1), (6, 1), (5, 0)}
    assert prefixes(run) == [(1, 5)]
    digests = {layer: text for outcome in run.outcomes for layer, text in outcome.layer_digests}
    short = run_threads(job(changed(config, steps=1, output=str(tmp_path / "short"))))
    before = {layer: text for outcome in short.outcomes for layer, text in outcome.layer_digests}
    assert {layer for layer in range(8) if digests[layer] == before[layer]} == {0, 1, 2, 3, 4}
    for report in (r for r in run.reports if isinstance(r, FreezeReport)):
        assert [action.actual for action in report.actions] == [
            {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.0}[action.stage] for action in report.actions
        ]


def test_gpt_tied_and_vit_have_the_same_bits_on_any_partition(tmp_path: Path) -> None:
    for name in ("gpt-tied", "vit"):
        config = real_config(
            tmp_path, name, steps=7, freeze=FreezeConfig(method="prefix", schedule=((2, 2), (4, 3)))
        )
        expected = run_threads(job(config, ranks=1))
        run = run_threads(job(config, ranks=2, schedule="zb-h1", recompute=True))
        assert run.state_sha256 == expected.state_sha256
        (tied, *_) = (r.tied for r in run.reports if isinstance(r, PrefixFrozen))
        assert bool(tied) == (name == "gpt-tied")


IN_THE_SUITE = [
    ("by hand", 3, FaultPhase.BEFORE_COMMIT),
    ("by hand", 3, FaultPhase.IN_COMMIT),
    ("paper", 3, FaultPhase.AFTER_COMMIT),
    ("paper", 4, FaultPhase.BACKWARD),
]
KILLED = [
    pytest.param(rule, step, phase, marks=() if (rule, step, phase) in IN_THE_SUITE else pytest.mark.soak)
    for rule in ("by hand", "paper")
    # The prefix changes after steps 1, 3, 5 and 7; every phase of a step that moves it, and of the one that follows it.
    for step, phase in (
        (3, FaultPhase.FORWARD),
        (3, FaultPhase.BEFORE_COMMIT),
        (3, FaultPhase.IN_COMMIT),
        (3, FaultPhase.AFTER_COMMIT),
        (4, FaultPhase.FORWARD),
        (4, FaultPhase.BACKWARD),
        (8, FaultPhase.IN_COMMIT),
    )
]


@pytest.mark.parametrize(("rule", "step", "phase"), KILLED)
def test_a_rank_that_comes_after_a_loss_learns_the_prefix(
    tmp_path: Path, rule: str, step: int, phase: FaultPhase
) -> None:
    config = drilled(small_config(tmp_path, "dropout", steps=9, freeze=METHODS[rule]))
    expected = run_threads(job(config))
    three = job(config, ranks=3, schedule="1f1b")
    with RankGroup(config, 4) as group:
        ended = group.train_with_loss(three, step, phase)
        assert state_sha256(ended) == expected.state_sha256
        told = {(report.step, report.layers) for report in group.of(PrefixFrozen)}
    assert sorted(told) == prefixes(expected)


@pytest.mark.each_choice
@pytest.mark.parametrize("phase", [FaultPhase.BACKWARD, FaultPhase.IN_COMMIT])
@pytest.mark.parametrize("thaw", ["plateau", "rate"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], pytest.param(SHAPES[2], marks=pytest.mark.soak)])
def test_a_prefix_that_thaws_has_one_trajectory(
    tmp_path: Path, thaw: str, phase: FaultPhase, shape: dict[str, Any]
) -> None:
    freeze = FreezeConfig.model_validate({"method": "prefix", "schedule": ((2, 5),), "thaw": thaw})
    # At such a rate the loss grows again.
    optimizer = OptimizerConfig(lr=1.0 if thaw == "plateau" else 0.01, warmup_steps=2)
    config = drilled(small_config(tmp_path, steps=12, freeze=freeze, validate_every=2, optimizer=optimizer))
    expected = run_threads(job(config))
    moved = prefixes(expected)
    assert [layers for _, layers in moved] == [5, 0]
    run = run_threads(job(config, **shape))
    assert (run.state_sha256, prefixes(run)) == (expected.state_sha256, moved)
    three = job(config, ranks=3, schedule="1f1b")
    with RankGroup(config, 4) as group:
        ended = group.train_with_loss(three, moved[1][0] - 1, phase)
        assert state_sha256(ended) == expected.state_sha256


def test_what_autofreeze_found_stable_is_trained_again_once_it_thaws(tmp_path: Path) -> None:
    freeze = METHODS["autofreeze"].model_copy(update={"thaw": "rate"})
    config = small_config(tmp_path, steps=12, freeze=freeze)
    run = run_threads(job(config, ranks=2, schedule="1f1b"))
    moved = prefixes(run)
    assert [layers for _, layers in moved][-1] == 0
    froze = {
        report.step
        for report in run.reports
        if isinstance(report, FreezeReport) and any(action.actual for action in report.actions)
    }
    assert moved[-1][0] - 1 in froze
    assert moved[-1][0] not in froze
    assert run_threads(job(config)).state_sha256 == run.state_sha256


def test_what_is_sent_of_a_frozen_layer_has_no_gradient_and_its_shards_are_sent_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels: dict[int, set[int]] = {}
    packed = Shipping._packed

    def seen(shipping: Shipping, index: int, buffers, energies):
        raw = packed(shipping, index, buffers, energies)
        parcels.setdefault(index, set()).add(raw.numel())
        return raw

    monkeypatch.setattr(Shipping, "_packed", seen)
    frozen = FreezeConfig(method="prefix", prefix=5)
    work = job(small_config(tmp_path, steps=4, freeze=frozen), ranks=2, schedule="1f1b")
    run = run_threads(replace(work, plan=with_standbys(work)))
    scalars = 24 * 48 * 2 + 48 + 24 + 24
    assert {layer: max(sizes) < 256 for layer, sizes in parcels.items()} == {n: n < 5 for n in range(8)}
    assert min(parcels[6]) > 4 * scalars
    assert (
        run.state_sha256
        == run_threads(job(small_config(tmp_path / "alone", steps=4, freeze=frozen))).state_sha256
    )

    sent: list[int] = []
    put = WeightExchange._send

    def counted(exchange: WeightExchange, stream: MessageStream, weights) -> None:
        sent.append(stream.tag)
        put(exchange, stream, weights)

    monkeypatch.setattr(WeightExchange, "_send", counted)
    shared = small_config(tmp_path / "shards", steps=4, replicas=2, freeze=frozen, shard="optimizer")
    work = job(shared, ranks=1)
    run_threads(replace(work, plan=replace(work.plan, shard="optimizer")))
    by_layer = [sent.count(tag) for tag in sorted({*sent})]
    # By both siblings as the generation begins, and of those that train after each step.
    assert by_layer == [2] * 5 + [10] * 3


@pytest.mark.parametrize("rule", ["by hand", "authors"])
def test_ranks_that_are_all_new_and_cut_otherwise_are_told_the_prefix(tmp_path: Path, rule: str) -> None:
    config = drilled(small_config(tmp_path, steps=9, freeze=METHODS[rule]))
    expected = run_threads(job(config))
    two, again = job(config, ranks=2, schedule="1f1b"), job(config, ranks=2, schedule="zbv")
    with RankGroup(config, 4) as group:
        assert parted(group.train(two, (0, 1), regroup_by=0)) == {1}
        step, positions, sources = group.finish_commit()
        (carried,) = {position.carried for position in positions.values() if position.step == step}
        assert carried is not None
        ended = group.train(again, (2, 3), step=step, sources=sources, carried=carried)
        assert state_sha256(ended) == expected.state_sha256


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_shards_have_the_bits_of_whole_states(tmp_path: Path, shard: str) -> None:
    config = small_config(tmp_path, steps=9, replicas=2, freeze=BY_HAND, shard=shard)
    runs = []
    for ranks, schedule in ((1, "1f1b"), (2, "zb-h1")):
        work = job(config, ranks=ranks, schedule=schedule)
        runs.append(run_threads(replace(work, plan=replace(work.plan, shard=shard))))
    assert len({run.state_sha256 for run in runs}) == 1
    if shard == "optimizer":
        whole = small_config(tmp_path / "whole", steps=9, replicas=2, freeze=BY_HAND)
        assert run_threads(job(whole)).state_sha256 == runs[0].state_sha256


def test_without_a_prefix_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert prefixes(run_threads(job(small_config(tmp_path)))) == []
