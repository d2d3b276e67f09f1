"""The predicted memory of a plan against the storages that are alive while it really trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from jobs import FAMILIES, job, small_config
from prompt_outbox import prompt_channel

from benchmarks.parts.random_pipelines import with_memory
from planner.plan import PlanError, recomputable
from planner.profile import Link, Profile
from planner.search.search import PlanWish, choose
from planner.search.standbys import assign
from planner.simulation.predict import predict
from workers.config import DataConfig, FreezeConfig, ModelConfig, WorkerConfig
from workers.launch.profile import ProfileRequest, profile_processes
from workers.launch.ranks import LaunchedJob, run_processes
from workers.profiling.measured import combine

# One process takes the measurements for all tests.
pytestmark = pytest.mark.xdist_group("counted_memory")

SIZES = {"microbatch_size": 32, "microbatches": 6}
COUNTED: dict[str, Any] = {"count_memory": True, "open_channel": prompt_channel}


def even_times(profile: Profile) -> Profile:
    """`profile` with its sizes and equal times, so that what is in flight does not depend on the machine."""
    layers = tuple(
        replace(layer, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, update_s=0.0)
        for layer in profile.model.layers
    )
    links = tuple(
        tuple(None if link is None else Link(latency_s=0.1, bytes_per_s=1e9) for link in row)
        for row in profile.cluster.links
    )
    return replace(
        profile,
        model=replace(profile.model, layers=layers),
        cluster=replace(profile.cluster, links=links),
    )


VOCABULARIES = (5, 800, 32_000)
RECOMPUTES = {"none": (), "all": recomputable(8), "some": (2, 3), "head": (6, 7)}
TIGHTEST = 800
"""The vocabulary of the plans with the tightest limit, whose layers recompute all or nothing."""


def with_head(output: Path, vocabulary: int, **changes: Any) -> WorkerConfig:
    model = ModelConfig(factory="small_models:model", arguments={"trait": "plain", "classes": vocabulary})
    return small_config(output, model=model, **{**SIZES, **changes})


def counted_and_predicted(profile: Profile, asked: LaunchedJob) -> tuple[list[int], tuple[int, ...]]:
    """Each rank's peak of the second step as counted, and as predicted with `profile`."""
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    return [counted[rank] for rank in sorted(counted)], predicted


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Profile]:
    """The profile for each vocabulary; each is measured once."""

    @cache
    def measured(vocabulary: int) -> Profile:
        config = with_head(tmp_path_factory.mktemp("profile"), vocabulary)
        return even_times(
            combine(profile_processes(ProfileRequest(config=config, ranks=2, budget_s=0.0)), config)
        )

    return measured


@pytest.mark.each_choice
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("again", RECOMPUTES)
def test_predicted_peaks_are_the_counted_ones(
    tmp_path: Path, profiles: Callable[[int], Profile], vocabulary: int, family: str, again: str
) -> None:
    config = with_head(tmp_path, vocabulary, steps=3, timeline_every=1)
    asked = job(config, ranks=2, schedule=family, recompute=RECOMPUTES[again], **COUNTED)
    counted, predicted = counted_and_predicted(profiles(vocabulary), asked)
    assert len(counted) == 2
    assert counted == pytest.approx(predicted, rel=0.02)


def gpt(output: Path, **changes: Any) -> WorkerConfig:
    model = ModelConfig(family="gpt", layers=8, width=64, heads=4, context=64)
    return small_config(
        output,
        model=model,
        data=DataConfig(source="python-docs", validation_batches=1),
        **{**SIZES, "microbatch_size": 8, **changes},
    )


@pytest.mark.parametrize(
    ("make", "families", "again"),
    [
        (gpt, ("1f1b",), True),
        (partial(with_head, vocabulary=8_000), ("interleaved",), False),
        pytest.param(gpt, ("interleaved",), True, marks=pytest.mark.soak),
    ],
    ids=["gpt that recomputes", "8,000 classes", "interleaved gpt that recomputes"],
)
def test_the_largest_peak_of_three_ranks(
    tmp_path: Path, make: Callable[..., WorkerConfig], families: Sequence[str], again: bool
) -> None:
    """What a pass needs while it runs differs between forward, input gradient and whole backward pass."""
    config = make(tmp_path / "profile")
    profile = even_times(
        combine(profile_processes(ProfileRequest(config=config, ranks=3, budget_s=0.0)), config)
    )
    layers = len(profile.model.layers)
    for family in families:
        config = make(tmp_path / family, steps=3, timeline_every=1)
        recompute = recomputable(layers) if again else ()
        asked = job(config, ranks=3, schedule=family, layers=layers, recompute=recompute, **COUNTED)
        counted, predicted = counted_and_predicted(profile, asked)
        assert counted == pytest.approx(predicted, rel=0.03), family
        assert max(counted) == pytest.approx(max(predicted), rel=0.02), family


@pytest.mark.parametrize("microbatches", [4, 8])
def test_one_rank_that_recomputes_the_head_takes_what_is_predicted(
    tmp_path: Path, profiles: Callable[[int], Profile], microbatches: int
) -> None:
    """All microbatches' outputs of the head are alive at once, and one recomputed output more."""
    config = with_head(tmp_path, 800, microbatches=microbatches, steps=3, timeline_every=1)
    asked = job(config, ranks=1, schedule="gpipe", recompute=RECOMPUTES["head"], **COUNTED)
    counted, predicted = counted_and_predicted(profiles(800), asked)
    assert counted == pytest.approx(predicted, rel=0.005)


@pytest.mark.each_choice
@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("recompute", [(), recomputable(8)], ids=["keeps", "recomputes"])
def test_the_plan_of_the_tightest_limit_takes_what_the_limit_is(
    tmp_path: Path, profiles: Callable[[int], Profile], recompute: tuple[int, ...], schedule: str
) -> None:
    """With a byte less there is no plan."""
    config = with_head(tmp_path, TIGHTEST, steps=3, timeline_every=1)
    wish = PlanWish(ranks=2, schedule=schedule, microbatches=SIZES["microbatches"], recompute=recompute)
    limit = 2**40
    while True:
        try:
            choice = choose(with_memory(profiles(TIGHTEST), limit), wish)
        except PlanError:
            break
        limit = choice.prediction.peak_memory_bytes - 1
    ran = run_processes(LaunchedJob(config, choice.plan, choice.schedule, **COUNTED))
    counted_bytes = max(one.peak_bytes for one in ran.memory if one.step == 2)
    assert counted_bytes == pytest.approx(limit + 1, rel=0.02)


def test_recomputing_the_head_costs_memory(profiles: Callable[[int], Profile], tmp_path: Path) -> None:
    """The loss keeps the head's outputs anyway, and the recomputation forms them a second time."""
    config = with_head(tmp_path, 800)
    without, with_it = (job(config, schedule="1f1b", recompute=again) for again in ((2, 3), (2, 3, 7)))
    peaks = [
        predict(profiles(800), one.plan, one.schedule).memory.peak_bytes[0] for one in (without, with_it)
    ]
    assert peaks[1] > peaks[0]
    assert 7 not in RECOMPUTES["all"]


@pytest.mark.parametrize("precision", ["bfloat16-autocast", "bfloat16"])
def test_casts_are_predicted_too(tmp_path: Path, precision: str) -> None:
    config = small_config(
        tmp_path,
        precision=precision,
        steps=3,
        timeline_every=1,
        model=ModelConfig(factory="small_models:model", arguments={"trait": "attention"}),
        **SIZES,
    )
    profile = even_times(
        combine(profile_processes(ProfileRequest(config=config, ranks=2, budget_s=0.0)), config)
    )
    asked = job(config, ranks=2, schedule="1f1b", **COUNTED)
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    assert [counted[rank] for rank in range(2)] == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(
    ("shard", "precision", "copies", "method"),
    [
        ("optimizer", "float32", 0, "apf"),
        pytest.param("optimizer", "float32", 1, "none", marks=pytest.mark.soak),
        pytest.param("optimizer", "bfloat16", 0, "none", marks=pytest.mark.soak),
        ("optimizer", "bfloat16", 1, "autofreeze"),
        ("gradients", "float32", 0, "none"),
        pytest.param("gradients", "bfloat16", 0, "none", marks=pytest.mark.soak),
    ],
)
def test_shards_and_their_copies_are_predicted(
    tmp_path: Path, shard: str, precision: str, copies: int, method: Any
) -> None:
    config = small_config(
        tmp_path,
        precision=precision,
        steps=6 if copies else 3,
        timeline_every=1,
        model=ModelConfig(factory="small_models:model", arguments={"trait": "plain", "classes": 300}),
        freeze=FreezeConfig(method=method, warm_up=3),
        **{**SIZES, "replicas": 2},
    )
    measured = combine(profile_processes(ProfileRequest(config=config, ranks=4, budget_s=0.0)), config)
    profile = even_times(measured.frozen_by(method))
    assert all(sum(layer.trained) * 4 == layer.gradient_bytes for layer in profile.model.layers)
    # Siblings send before they receive: their messages cannot wait for each other.
    whole = job(config, ranks=2, schedule="1f1b", count_memory=True)
    plan = replace(whole.plan, shard=shard)
    if copies:
        sizes = [layer.parameter_bytes for layer in profile.model.layers]
        plan = replace(plan, standbys=assign(plan, list("abcd"), sizes))
    asked = replace(whole, plan=plan)
    # A thread that is kept from its core may update a copy beside the next step: not in all of them.
    counted: dict[int, int] = {}
    for one in run_processes(asked).memory:
        if 2 <= one.step < config.job.steps:
            counted[one.rank] = min(one.peak_bytes, counted.get(one.rank, one.peak_bytes))
    predicted = predict(profile, plan, asked.schedule).memory.peak_bytes
    taken = [max(counted[place] for place in plan.siblings(rank)) for rank in range(2)]
    # Beside the window, the update of a copy has scratch of a parameter's size: much, in layers as small as these.
    assert taken == pytest.approx(predicted, rel=0.05 if copies else 0.03)
    if not copies:
        all_states = predict(profile, whole.plan, whole.schedule).memory.peak_bytes
        assert all(less < more for less, more in zip(predicted, all_states, strict=True))


def test_fixed_parameters_are_predicted_without_gradients_and_moments(tmp_path: Path) -> None:
    model = ModelConfig(factory="small_models:model", arguments={"trait": "fixed"})
    config = small_config(tmp_path, steps=3, timeline_every=1, model=model, **SIZES)
    profile = even_times(
        combine(profile_processes(ProfileRequest(config=config, ranks=2, budget_s=0.0)), config)
    )
    adapted, residual = profile.model.layers[3], profile.model.layers[2]
    trained_bytes = 4 * (24 * 24 + 24)
    assert adapted.optimizer_bytes == 2 * adapted.gradient_bytes == 2 * trained_bytes
    assert adapted.parameter_bytes == residual.parameter_bytes + trained_bytes
    asked = job(config, ranks=2, schedule="1f1b", **COUNTED)
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    assert [counted[rank] for rank in range(2)] == pytest.approx(predicted, rel=0.02)


def test_nothing_is_counted_unasked(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=1, timeline_every=1)
    assert run_processes(job(config, ranks=1)).memory == []
