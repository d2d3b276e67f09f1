"""Real measurements of small models: counts equal those by hand, and times are sane."""

from __future__ import annotations

import gc
import math
import re
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from jobs import job, small_config
from measured_model import BATCH, HIDDEN, READ_S, SLEPT_S, WIDTH
from test_engine_bits import real_config

from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from planner.adapt.speeds import slowdown_of
from planner.freeze.decision import measured_weights
from planner.profile import DeviceProfile, Profile
from workers.config import DataConfig, EmulatedConfig, ModelConfig, WorkerConfig
from workers.freezing.mask import LayerParameters
from workers.launch.profile import ProfileRequest, profile_processes
from workers.launch.ranks import assignment
from workers.profiling import profiler
from workers.profiling.chain import Chain
from workers.profiling.cost_settings import cost_settings
from workers.profiling.counted_memory import LiveStorages
from workers.profiling.measured import Measured, combine
from workers.profiling.profiler import REPEATS
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import Report, TimelineReport
from workers.rank import Rank
from workers.step.step_reports import stage_times

F32 = 4


def config(folder: Path, kind: str = "mlp", **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "microbatch_size": BATCH,
        "model": ModelConfig(factory="measured_model:model", arguments={"kind": kind}),
        "data": DataConfig(source="measured_model:Vectors"),
    }
    return small_config(folder, **{**fields, **changes})


def ignore(report: Report) -> None:
    pass


def measured(config: WorkerConfig, ranks: int = 1) -> Profile:
    """The profile of `config`, measured on ranks that are threads."""
    hub = Hub(ranks)
    results: dict[int, Measured] = {}

    def host(number: int) -> None:
        rank = Rank(config, number, ignore)
        rank.setup()
        generation = Generation(
            number=1, epoch=1, members=tuple(range(ranks)), store_host="", store_port=0, timeout_s=10.0
        )
        rank.join(generation, LocalChannel(hub, number))
        results[number] = rank.profile(0.05)

    threads = [threading.Thread(target=host, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return combine([results[number] for number in range(ranks)], config)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return measured(config(tmp_path_factory.mktemp("mlp")))


def test_what_a_layer_keeps_is_what_a_hand_counts(mlp: Profile) -> None:
    up, down = mlp.model.layers
    x, hidden = F32 * BATCH * WIDTH, F32 * BATCH * HIDDEN
    # The layer keeps relu's output, which is its own output, and the batch; nothing else outlives the forward
    # pass.
    assert up.activation_bytes == x + hidden
    assert (up.input_bytes, up.boundary_bytes, up.boundary_grad_bytes) == (x, hidden, hidden)
    # The hold is the matrix's input and the gradient of its output.
    assert up.weight_grad_hold_bytes == x + hidden
    # It keeps its output, the loss's difference before the square, and the loss; its input is up's output.
    assert down.activation_bytes == x + x + F32
    assert (down.input_bytes, down.boundary_bytes, down.boundary_grad_bytes) == (hidden, 0, 0)
    # The hold is the matrix's input, which has been up's output so far, and the gradient of its output.
    assert down.weight_grad_hold_bytes == hidden + x


def test_state_is_counted(mlp: Profile) -> None:
    up, down = mlp.model.layers
    assert (up.parameters, down.parameters) == (WIDTH * HIDDEN + HIDDEN, WIDTH * HIDDEN)
    for layer in mlp.model.layers:
        assert layer.parameter_bytes == layer.gradient_bytes == F32 * layer.parameters
        assert layer.optimizer_bytes == 2 * layer.parameter_bytes  # AdamW's two moments
    assert [m.name for m in up.matrices] == ["linear.weight"]
    assert up.matrices[0].shape == (HIDDEN, WIDTH)
    assert up.matrices[0].scratch_bytes == F32 * HIDDEN * WIDTH


def test_times_are_sane_and_matrices_share_their_layers(mlp: Profile) -> None:
    for layer in mlp.model.layers:
        assert min(layer.forward_s, layer.input_grad_s, layer.weight_grad_s, layer.update_s) > 0
        assert sum(m.weight_grad_s for m in layer.matrices) == pytest.approx(layer.weight_grad_s, rel=1e-12)
    assert Profile.from_json(mlp.to_json()) == mlp


@pytest.mark.parametrize("name", ["gpt-tied", "vit"])
def test_freeze_plans_weigh_the_matrices_that_ranks_freeze(tmp_path: Path, name: str) -> None:
    config = real_config(tmp_path, name)
    weights = measured_weights(measured(config))
    rank = Rank(config, 0, ignore)
    rank.setup()
    rank.follow(assignment(job(config), 0))
    for layer, (_, state) in sorted(rank._holdings.layers.items()):
        held = LayerParameters.of(state)
        matrices = {n for n in held.names if state.weights[n].dim() >= 2}
        assert {n for n, weight in weights[layer] if weight} <= matrices == {n for n, _ in weights[layer]}
        assert bool(sum(held.weighed(weights[layer]).weights)) == bool(matrices)
    assert len(weights) == len(rank._holdings.layers)
    rank.close()


def test_casts_and_their_scratch_are_counted(tmp_path: Path) -> None:
    up, _ = measured(config(tmp_path, precision="bfloat16-autocast")).model.layers
    matrix = WIDTH * HIDDEN
    assert up.parameter_bytes == F32 * up.parameters + 2 * matrix
    assert up.matrices[0].scratch_bytes == 2 * matrix
    assert up.gradient_bytes == F32 * up.parameters


def test_a_second_walk_is_named_and_timed(tmp_path: Path) -> None:
    layer = measured(config(tmp_path, "raw")).model.layers[2]
    assert layer.uncovered == ("matrix",)
    assert [m.name for m in layer.matrices] == ["linear.weight", "matrix"]
    assert all(m.weight_grad_s > 0 for m in layer.matrices)
    assert layer.weight_grad_s == pytest.approx(sum(m.weight_grad_s for m in layer.matrices), rel=1e-12)


def test_a_model_too_large_at_once_is_measured_in_parts(
    tmp_path: Path, mlp: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.profiling.profiler.SHARE", 0.0)
    measure_part, before = profiler._measure_part, list[weakref.ref[Chain]]()

    def watched(subject: Any, chain: Chain, *given: Any) -> Any:
        gc.collect()
        assert all(one() is None for one in before), "the part before is still in memory"
        before.append(weakref.ref(chain))
        return measure_part(subject, chain, *given)

    monkeypatch.setattr(profiler, "_measure_part", watched)
    parts = measured(config(tmp_path))
    assert len(before) == len(mlp.model.layers)
    whole = mlp.model.layers
    for part, layer in zip(parts.model.layers, whole, strict=True):
        assert (part.activation_bytes, part.weight_grad_hold_bytes, part.boundary_bytes) == (
            layer.activation_bytes,
            layer.weight_grad_hold_bytes,
            layer.boundary_bytes,
        )


def test_an_emulated_device_tells_its_modelled_times(tmp_path: Path) -> None:
    emulated = EmulatedConfig(
        forward_s=(0.004, 0.002), input_grad_s=(0.003, 0.004), weight_grad_s=(0.002, 0.005)
    )
    up, down = measured(config(tmp_path, device="emulated", emulated=emulated)).model.layers
    for layer, times in ((up, (0.004, 0.003, 0.002)), (down, (0.002, 0.004, 0.005))):
        for seconds, modelled in zip(
            (layer.forward_s, layer.input_grad_s, layer.weight_grad_s), times, strict=True
        ):
            assert seconds >= modelled
    assert sum(m.weight_grad_s for m in down.matrices) == pytest.approx(down.weight_grad_s)


def quietest(given: WorkerConfig, most_s: float) -> list[float]:
    """The forward times of the layers, measured until all are below `most_s`, at most ten times; the shortest set.

    Other work on the machine makes times longer, and none shorter.
    """
    sets: list[list[float]] = []
    while len(sets) < 10 and not (sets and max(sets[-1]) < most_s):
        sets.append([layer.forward_s for layer in measured(given).model.layers])
    return min(sets, key=max)


def test_the_times_of_a_model_include_the_reading_of_its_data_on_every_device(tmp_path: Path) -> None:
    slow = DataConfig(source="measured_model:SlowVectors")
    # Training reads them ahead, and these layers take next to no time to read them behind.
    forward_s = quietest(config(tmp_path, data=slow), 1.5 * READ_S)
    assert 0.8 * READ_S <= min(forward_s) <= max(forward_s) < 1.5 * READ_S
    emulated = EmulatedConfig(forward_s=2 * READ_S, input_grad_s=0.0, weight_grad_s=0.0)
    forward_s = quietest(config(tmp_path, data=slow, device="emulated", emulated=emulated), 3 * READ_S)
    assert 2 * READ_S <= min(forward_s) <= max(forward_s) < 3 * READ_S


def test_a_rank_that_reads_takes_as_long_as_its_profile_expects(tmp_path: Path) -> None:
    """Its layers take long enough for the next microbatch to be read meanwhile."""
    given = config(
        tmp_path, "slow", data=DataConfig(source="measured_model:SlowVectors"), steps=8, timeline_every=1
    )
    asked = job(given, ranks=2, schedule="1f1b", layers=2)
    reports = run_threads(asked).reports
    profile = measured(given)
    first, *_ = profile.model.layers
    assert SLEPT_S <= first.forward_s < SLEPT_S + 0.5 * READ_S
    for rank in range(2):
        timelines = [one for one in reports if isinstance(one, TimelineReport) and one.rank == rank]
        spans = [span for one in timelines if one.step >= 3 for span in one.spans]
        # Ranks that are threads wait for each other's draws, which makes some forward passes longer and none shorter;
        # with a read in its midst each would take 1.7 times as long.
        forward = [one for one in spans if one.action.startswith(f"{rank}F")]
        quickest = min(forward, key=lambda one: one.end_s - one.start_s)
        slowdown, why = slowdown_of(profile, asked.plan, rank, stage_times([quickest]), frozen=False)
        assert slowdown is not None, why
        assert 0.8 < slowdown < 1.4


def test_ranks_measure_together_and_know_all_links(tmp_path: Path) -> None:
    profiles = profile_processes(ProfileRequest(config=config(tmp_path), ranks=3, budget_s=0.05))
    assert [one.rank for one in profiles] == [0, 1, 2]
    assert len({len(one.repeats_s) for one in profiles}) == 1
    assert len(profiles[0].repeats_s) >= REPEATS
    assert profiles[0].links == profiles[1].links == profiles[2].links
    profile = combine(profiles, config(tmp_path))
    for a, row in enumerate(profile.cluster.links):
        for b, link in enumerate(row):
            assert (link is None) == (a == b)
            if link is not None:
                assert link.transfer_s(2048) > 0
                assert math.isfinite(link.bytes_per_s)
    assert profile.cluster.commit_s > 0
    assert len({device.memory_bytes for device in profile.cluster.devices}) == 1
    for name in ("stream_s_per_byte", "socket_s_per_byte"):
        # A rank that other work disturbs too much does not tell.
        known = [cost for one in profiles if (cost := getattr(one.device, name)) is not None]
        assert {getattr(device, name) for device in profile.cluster.devices} == {
            median(known) if known else None
        }
        assert all(0 <= one < 1e-6 for one in known)
    assert Profile.from_json(profile.to_json()) == profile


def test_a_layer_that_does_not_work_is_told(tmp_path: Path) -> None:
    told = (
        r"the forward pass of layer \w+ raised ValueError: this layer does not work,"
        r" at \S+/measured_model\.py:\d+ in forward$"
    )
    with pytest.raises(JobError, match=told):
        profile_processes(ProfileRequest(config=config(tmp_path, "broken"), ranks=2, budget_s=0.05))
    wrong = config(tmp_path, data=DataConfig(source="measured_model:Nothing"))
    with pytest.raises(JobError, match="Nothing"):
        profile_processes(ProfileRequest(config=wrong, ranks=2, budget_s=0.05))


def test_a_rank_that_crashes_ends_the_measurement_with_its_stack(tmp_path: Path) -> None:
    told = r"rank 0 died as it measured the job: signal SIGSEGV \(segmentation fault\)\n"
    with pytest.raises(JobError, match=rf"^{told}its last calls, innermost first:\n") as failed:
        profile_processes(ProfileRequest(config=config(tmp_path, "crashed"), ranks=1, budget_s=0.05))
    assert re.search(r"measured_model\.py\", line \d+ in forward\n", str(failed.value))


def test_a_layer_that_exits_ends_the_measurement_in_words(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"called sys\.exit\(3\): raise an exception"):
        profile_processes(ProfileRequest(config=config(tmp_path, "exits"), ranks=1, budget_s=0.05))


def slow(rank: int, repeats_s: tuple[float, ...], like: Profile) -> Measured:
    return Measured(
        rank=rank,
        layers=like.model.layers,
        checked=True,
        repeats_s=repeats_s,
        device=DeviceProfile(kind="cpu", name="x", memory_bytes=1),
        links=((None,) * 3,) * 3,
        commit_s=0.0,
        receives_ahead=4,
        sends_kept=4,
    )


def test_slowdowns_are_relative_and_noise_is_none(mlp: Profile, tmp_path: Path) -> None:
    one, two = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)
    ranks = [slow(0, one, mlp), slow(1, (1.03, 1.0, 1.03), mlp), slow(2, two, mlp)]
    devices = combine(ranks, config(tmp_path)).cluster.devices
    assert [device.slowdown for device in devices] == [1.0, 1.0, pytest.approx(2 / 1.03)]


def test_times_are_medians_over_ranks(mlp: Profile, tmp_path: Path) -> None:
    up, down = mlp.model.layers
    ranks = []
    for rank, factor in enumerate((1.0, 2.0, 7.0)):
        layer = replace(
            up,
            forward_s=factor,
            weight_grad_s=10 * factor,
            matrices=(replace(up.matrices[0], weight_grad_s=10 * factor),),
        )
        ranks.append(replace(slow(rank, (1.0,), mlp), layers=(layer, down)))
    layer = combine(ranks, config(tmp_path)).model.layers[0]
    assert (layer.forward_s, layer.weight_grad_s, layer.matrices[0].weight_grad_s) == (2.0, 20.0, 20.0)


def test_a_profile_says_which_settings_it_was_made_with(mlp: Profile, tmp_path: Path) -> None:
    assert mlp.model.settings == {
        "model.factory": "measured_model:model",
        "model.arguments": {"kind": "mlp"},
        "data.source": "measured_model:Vectors",
        "data.arguments": {},
        "optimizer.name": config(tmp_path).optimizer.name,
    }
    # Parameters determine the width; with rotary positions they do not determine the context.
    llama = small_config(tmp_path, model=ModelConfig(family="llama", context=64), data=DataConfig())
    settings = cost_settings(llama)
    assert (settings["model.family"], settings["model.context"]) == ("llama", 64)
    assert not {"model.width", "model.image_size", "data.source"} & settings.keys()


def test_storages_are_counted_until_they_die() -> None:
    before = torch.zeros(100)
    with LiveStorages() as live:
        live.add([before, before.view(10, 10)])
        assert live.live_bytes == 400
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]
        assert live.live_bytes == 4400
        del a
        assert live.live_bytes == 4400  # b keeps it
        c = (b * 2).sum()
        assert (live.live_bytes, live.peak_bytes) == (4404, 4400 + 2800 + 4)
        del b
        assert live.live_bytes == 404
        assert live.restart() == 7204
        assert live.peak_bytes == 404
        del c
