"""The memory that a plan is predicted to need, against the storages that live while it really trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import FAMILIES, job, small_config

from planner.profile import Link, Profile
from planner.simulation.predict import predict
from workers.config import ModelConfig
from workers.launch.profile import Request, profile_processes
from workers.launch.ranks import run_processes
from workers.profiling.measured import combine

SIZES = {"microbatch_size": 32, "microbatches": 6}


def even_times(profile: Profile) -> Profile:
    """With its sizes as measured, and all times equal: what is in flight must not hang on a busy machine."""
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


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    config = small_config(tmp_path_factory.mktemp("profile"), **SIZES)
    return even_times(combine(profile_processes(Request(config=config, ranks=2, budget_s=0.0)), config))


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_peaks_are_the_counted_ones(tmp_path: Path, family: str, profile: Profile) -> None:
    config = small_config(tmp_path, steps=3, timeline_every=1, **SIZES)
    asked = job(config, ranks=2, schedule=family, count_memory=True)
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    assert [counted[rank] for rank in range(2)] == pytest.approx(predicted, rel=0.05)


def test_recomputing_layers_keep_their_inputs_only(tmp_path: Path, profile: Profile) -> None:
    config = small_config(tmp_path, steps=3, timeline_every=1, **SIZES)
    asked = job(config, ranks=2, schedule="gpipe", recompute=True, count_memory=True)
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    assert [counted[rank] for rank in range(2)] == pytest.approx(predicted, rel=0.05)


def test_casts_are_predicted_too(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        precision="bfloat16",
        steps=3,
        timeline_every=1,
        model=ModelConfig(factory="small_models:model", arguments={"trait": "attention"}),
        **SIZES,
    )
    profile = even_times(combine(profile_processes(Request(config=config, ranks=2, budget_s=0.0)), config))
    asked = job(config, ranks=2, schedule="1f1b", count_memory=True)
    counted = {one.rank: one.peak_bytes for one in run_processes(asked).memory if one.step == 2}
    predicted = predict(profile, asked.plan, asked.schedule).memory.peak_bytes
    assert [counted[rank] for rank in range(2)] == pytest.approx(predicted, rel=0.05)


def test_nothing_is_counted_unasked(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=1, timeline_every=1)
    assert run_processes(job(config, ranks=1)).memory == []
