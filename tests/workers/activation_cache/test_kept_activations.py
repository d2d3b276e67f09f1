"""What frozen layers have made of a sample is kept for the next epochs: the bits are those without."""

import importlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256, with_standbys
from small_models import WIDTH, Vectors
from torch import Tensor, nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.activation_cache import cache, cache_folders, code
from workers.activation_cache.elsewhere import AGAIN, TRIES
from workers.activation_cache.trial import NEIGHBOURS, WAY_OUT
from workers.checkpoint.folder import checkpoints
from workers.config import ClusterConfig, DataConfig, EmulatedConfig, FreezeConfig, WorkerConfig
from workers.data import read_ahead
from workers.data.dataset import Batch
from workers.devices.device import CpuDevice
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.fault_injection.points import FaultPhase
from workers.launch.ranks import LaunchedRun
from workers.layers.layer import Layer
from workers.protocol.errors import JobError
from workers.protocol.orders import Request
from workers.protocol.reports import (
    ActivationsKept,
    ActivationsUsed,
    StepReport,
    ValidationReport,
    WarningReport,
)
from workers.step import equipment

STEPS = 28
"""Three and a half epochs of 8 steps, with 4 microbatches of 2 samples each."""
BY_HAND = FreezeConfig(method="prefix", schedule=((2, 3), (11, 5)))
"""More in the second epoch."""
SHAPES = [
    {"ranks": 1},
    {"ranks": 2, "schedule": "1f1b", "counts": (6, 2)},
    {"ranks": 3, "schedule": "zb-h1", "counts": (3, 3, 2)},
    {"ranks": 2, "schedule": "interleaved"},
    {"ranks": 2, "schedule": "1f1b", "counts": (6, 2), "recompute": True},
]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of its own, and layers that take long: keeping always pays. Reads are made in their turn: one that
    is made ahead may look for a sample before it has been kept."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(cache_folders, "MEMORY", folder)
    monkeypatch.setattr(CpuDevice, "forward_s", lambda *_: 1.0)
    monkeypatch.setattr(read_ahead, "SLOW_S", float("inf"))
    return folder


def kept(run: LaunchedRun, *, held_out: bool = False) -> list[tuple[int, str]]:
    """Layers whose outputs were to be kept, and why not."""
    found = [r for r in run.reports if isinstance(r, ActivationsKept) and r.held_out == held_out]
    return [(r.layers, r.why_not) for r in found]


def used(run: LaunchedRun) -> tuple[int, int]:
    """Microbatches found, and computed, some of them from fewer layers on."""
    found = [r for r in run.reports if isinstance(r, ActivationsUsed)]
    return sum(r.hits for r in found), sum(r.partly + r.misses for r in found)


def without(config: WorkerConfig) -> WorkerConfig:
    """The same job that keeps nothing."""
    return changed(config, freeze=config.freeze.model_copy(update={"cache": "off"}))


def compared(config: WorkerConfig, ranks: int) -> LaunchedRun:
    """A run of `config`, which must have the bits of one that keeps nothing."""
    run = run_threads(job(config, ranks=ranks))
    expected = run_threads(job(without(config)))
    assert run.state_sha256 == expected.state_sha256
    assert used(expected) == (0, 0)
    return run


@pytest.mark.each_choice
@pytest.mark.parametrize("trait", ["plain", "two-outputs", "transposed", "attention"])
@pytest.mark.parametrize(
    ("shape", "after", "hits"),
    [*zip(SHAPES, ([3, 5], [3, 5], [3], [2], [3, 5]), (39, 39, 72, 72, 39), strict=True)],
)
def test_the_bits_are_those_without(
    tmp_path: Path, memory: Path, trait: str, shape: dict[str, Any], after: list[int], hits: int
) -> None:
    config = small_config(tmp_path, trait, steps=STEPS, freeze=BY_HAND)
    expected = run_threads(job(without(config)))
    run = run_threads(job(config, **shape))
    assert run.state_sha256 == expected.state_sha256
    # On some processors a small product's bits depend on the rows beside it: then that depth is refused.
    assert [layers for layers, _ in kept(run)] == after
    refused = {why for _, why in kept(run) if why}
    assert refused <= {NEIGHBOURS}
    if not refused:
        assert used(run) == (hits, 27 * 4 - hits)
    assert [*memory.iterdir()] == []
    assert not (Path(config.job.folder) / "activations").exists()


def test_the_bits_are_those_without_where_reads_are_made_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, ahead = read_ahead.ReadAhead.begin, 0

    def at_once(reading: read_ahead.ReadAhead, coming: Any, read: Any) -> None:
        nonlocal ahead
        reading.ahead = True
        begin(reading, coming, read)
        ahead += reading.ahead

    monkeypatch.setattr(read_ahead.ReadAhead, "begin", at_once)
    hits, computed = used(compared(small_config(tmp_path, steps=STEPS, freeze=BY_HAND), ranks=2))
    assert hits + computed == 27 * 4
    assert hits >= 30, "at most a few were looked for too early"
    assert ahead > STEPS


@pytest.mark.each_choice
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_16_bits_and_with_replicas_too(tmp_path: Path, precision: str, ranks: int) -> None:
    config = small_config(tmp_path, steps=STEPS, freeze=BY_HAND, precision=precision, replicas=2)
    assert used(compared(config, ranks=ranks))[0] > 100


def test_no_sample_goes_through_a_frozen_layer_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: Counter[int] = Counter()
    forward = Layer.forward_frozen

    def counted(layer: Layer, inputs: tuple[Tensor, ...], draw_key: int, *, training: bool):
        passes[layer.index] += len(inputs[0])
        return forward(layer, inputs, draw_key, training=training)

    monkeypatch.setattr(Layer, "forward_frozen", counted)
    # Whole epochs, in an order in which microbatches hold the same samples each time.
    monkeypatch.setattr("workers.step.minibatch.train_places", in_order)
    freeze = FreezeConfig(method="prefix", schedule=((1, 3), (12, 5)))
    run = run_threads(job(small_config(tmp_path, steps=24, freeze=freeze)))
    tried = 2 * 3
    """Samples of the trials of a depth: one microbatch in three orders."""
    assert passes == dict.fromkeys(range(5), 64 + tried)
    assert used(run) == (24 * 4 - 64, 64)
    assert sum(r.partly for r in run.reports if isinstance(r, ActivationsUsed)) == 32


def in_order(seed: int, positions: range, samples: int, shuffle: str | None) -> list[tuple[int, int]]:
    return [divmod(place, samples) for place in positions]


@pytest.mark.parametrize(
    ("trait", "why"),
    [
        ("dropout", f"frozen layer l3 draws anew in each step: {WAY_OUT}"),
        ("batchnorm", f"the buffers of frozen layer l3 go on following the batches: {WAY_OUT}"),
    ],
)
def test_what_changes_from_step_to_step_is_not_kept(tmp_path: Path, trait: str, why: str) -> None:
    run = compared(small_config(tmp_path, trait, steps=STEPS, freeze=BY_HAND), ranks=2)
    assert kept(run) == [(3, ""), (4, why)]
    assert used(run)[0] >= 70, "those before are"
    at_once = FreezeConfig(method="prefix", prefix=7)
    run = compared(small_config(tmp_path / "once", trait, steps=STEPS, freeze=at_once), ranks=1)
    assert kept(run) == [(7, why), (3, "")]
    calm = BY_HAND.model_copy(update={"frozen_mode": "eval"})
    run = compared(small_config(tmp_path / "calm", trait, steps=STEPS, freeze=calm), ranks=2)
    assert {said for _, said in kept(run)} == {""}
    assert used(run)[0] > 30


def test_held_out_samples_are_kept_beside(tmp_path: Path) -> None:
    freeze = FreezeConfig(method="prefix", prefix=4)
    config = small_config(tmp_path, "dropout", steps=10, freeze=freeze, validate_every=1)
    run = compared(config, ranks=1)
    assert kept(run) == [(4, f"frozen layer l3 draws anew in each step: {WAY_OUT}"), (3, "")]
    assert kept(run, held_out=True) == [(3, "")]
    # 8 held-out samples in 4 microbatches, after each of 10 steps, of which the last 2 are of the second epoch. The
    # first microbatch was tried with one layer more.
    assert used(run) == (9 * 4 + 2 * 4, 4 + 8 * 4 - 1)


def test_a_rank_with_the_first_stage_and_the_last_validates_as_others_do(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=20, freeze=BY_HAND, validate_every=4)
    losses = [
        [r.loss for r in run.reports if isinstance(r, ValidationReport)]
        for run in (
            run_threads(job(without(config))),
            run_threads(job(config)),
            run_threads(job(config, ranks=2, schedule="zbv")),
            run_threads(job(config, ranks=1, schedule="interleaved")),
        )
    ]
    assert len(losses[0]) == 5
    assert losses == [losses[0]] * 4


def test_nothing_is_kept_of_samples_that_never_come_again(tmp_path: Path) -> None:
    once = FreezeConfig(method="prefix", prefix=4, cache=str(tmp_path / "kept"))
    run = compared(small_config(tmp_path, steps=8, freeze=once), ranks=1)
    assert kept(run) == kept(run, held_out=True) == []
    run = compared(small_config(tmp_path / "more", steps=9, freeze=once), ranks=1)
    assert kept(run) == [(4, "")]
    assert kept(run, held_out=True) == []
    assert used(run) == (4, 32)


class Broken(Vectors):
    """Cannot be read to its end."""

    reads = 0

    def train(self, indices: list[int]) -> Batch:
        Broken.reads += 1
        if Broken.reads > 100:
            raise RuntimeError("the disk is gone")
        return super().train(indices)


def test_a_job_that_fails_leaves_nothing_in_memory(tmp_path: Path, memory: Path) -> None:
    config = small_config(tmp_path, steps=STEPS, freeze=BY_HAND)
    config = changed(config, data=DataConfig(source=f"{__name__}:Broken"))
    with pytest.raises(Exception, match="the disk is gone"):
        run_threads(job(config))
    assert [*memory.iterdir()] == []


def test_other_code_of_a_layer_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "code_of_a_user.py"
    body = "from torch import nn\nclass Own(nn.Module):\n    def forward(self, x):\n        return x{}\n"
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for change in ("", " + 1", ""):
        file.write_text(body.format(change))
        code._content.cache_clear()
        sys.modules.pop("code_of_a_user", None)
        own = importlib.import_module("code_of_a_user").Own()
        digests.append((code.code_of(nn.Sequential(own)), code.code_of_source("code_of_a_user:Own")))
    assert digests[0] == digests[2]
    assert all(a != b for a, b in zip(digests[0], digests[1], strict=True))
    assert code.code_of_source("table") == ""


def test_thawed_layers_are_trained_and_what_was_kept_before_is_never_found_again(tmp_path: Path) -> None:
    freeze = FreezeConfig(method="prefix", schedule=((2, 5), (11, 2), (12, 0), (14, 5), (25, 6)))
    run = compared(small_config(tmp_path, steps=STEPS + 8, freeze=freeze), ranks=2)
    assert [layers for layers, _ in kept(run)] == [4, 2, 4]
    assert used(run)[0] > 20


class Noisy(Vectors):
    """Draws beside its samples, from torch's generator."""

    def train(self, indices: list[int]) -> Batch:
        batch = super().train(indices)
        return replace(batch, inputs=tuple(t + torch.randn(t.shape) for t in batch.inputs))


class Keyed(Vectors):
    """Draws with the keys that it is given."""

    def train(self, indices: list[int], draws: list[int]) -> Batch:  # type: ignore[override]
        noise = [torch.full((WIDTH,), (key % 100) / 100) for key in draws]
        batch = super().train(indices)
        return replace(batch, inputs=tuple(t + torch.stack(noise) for t in batch.inputs))

    def validation(self, indices: list[int]) -> Batch:
        return Vectors().validation(indices)


class Padded(Vectors):
    """Fills samples up to the longest of their microbatch; the layers see what of it is filling."""

    def train(self, indices: list[int]) -> Batch:
        batch = super().train(indices)
        longest = max(index % 7 for index in indices)
        return replace(batch, inputs=tuple(t + longest for t in batch.inputs))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("Noisy", "a sample is not the same whenever it is read"),
        ("Padded", "a sample is not the same whenever it is read"),
        ("Keyed", "the samples are drawn anew in each epoch (augmentation)"),
    ],
)
def test_samples_that_change_are_not_kept(tmp_path: Path, source: str, why: str) -> None:
    config = small_config(tmp_path, steps=STEPS, freeze=BY_HAND)
    config = changed(config, data=DataConfig(source=f"{__name__}:{source}"))
    run = compared(config, ranks=1)
    assert {said for _, said in kept(run)} == {why}
    assert used(run) == (0, 0)


def test_what_takes_longer_to_read_than_to_compute_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "forward_s", lambda *_: 1e-9)
    run = compared(small_config(tmp_path, steps=STEPS, freeze=BY_HAND), ranks=1)
    assert kept(run) == [(layers, "reading them takes longer than computing them") for layers in (3, 5)]
    assert used(run) == (0, 0)
    (told, _) = (r for r in run.reports if isinstance(r, ActivationsKept))
    assert 0 < told.computed_s < told.read_s < 1


def test_a_resumed_job_finds_what_it_kept_in_a_folder_and_no_flipped_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = BY_HAND.model_copy(update={"cache": str(tmp_path / "kept")})
    config = small_config(tmp_path / "run", steps=STEPS, freeze=freeze)
    expected = run_threads(job(without(config)))
    for case in ("whole", "flipped", "other", "code", "source"):
        again = changed(config, output=str(tmp_path / case))
        run_threads(job(again, stop_at=20))
        (newest,) = checkpoints(again.job.folder)
        (file,) = (tmp_path / "kept").glob("*/*.slots")
        if case == "flipped":
            raw = bytearray(file.read_bytes())
            slot = int(file.stem) + 20
            for sample in range(64):
                raw[sample * slot + sample] ^= 1 << sample % 8
            file.write_bytes(raw)
        if case == "other":
            raw = file.read_bytes()
            slot = int(file.stem) + 20
            file.write_bytes(raw[slot : 64 * slot] + raw[:slot])
        with monkeypatch.context() as changed_since:
            if case == "code":
                changed_since.setattr(cache, "code_of", lambda _: b"other code")
            if case == "source":
                changed_since.setattr(equipment, "code_of_source", lambda _: "other data")
            resumed = run_threads(job(again, start=newest, generation=2))
        assert resumed.state_sha256 == expected.state_sha256, case
        found, computed = used(resumed)
        assert found + computed == 8 * 4
        assert found == (25 if case == "whole" else 4), case
        assert [*(tmp_path / "kept").iterdir()] == [], "the job is done"


def test_jobs_that_share_a_folder_find_nothing_of_each_other_nor_of_another_seed(tmp_path: Path) -> None:
    alone = compared(small_config(tmp_path / "alone", steps=STEPS, freeze=BY_HAND), ranks=1)
    freeze = BY_HAND.model_copy(update={"cache": str(tmp_path / "kept")})
    first = small_config(tmp_path / "first", steps=STEPS, freeze=freeze)
    run_threads(job(first, stop_at=20))
    lying = {file: file.read_bytes() for file in (tmp_path / "kept").glob("*/*.slots")}
    assert lying, "a job that is stopped leaves what it kept"
    second = run_threads(job(changed(first, output=str(tmp_path / "second"))))
    assert used(second) == used(alone)
    assert second.state_sha256 == alone.state_sha256
    assert {file: file.read_bytes() for file in (tmp_path / "kept").glob("*/*.slots")} == lying
    # In the first one's own folder, from the beginning.
    other = changed(first, seed=first.job.seed + 1)
    found = run_threads(job(other))
    fresh = small_config(tmp_path / "fresh", steps=STEPS, freeze=BY_HAND, seed=other.job.seed)
    alone_too = compared(fresh, ranks=1)
    assert used(found) == used(alone_too)
    assert found.state_sha256 == alone_too.state_sha256 != alone.state_sha256


def test_a_bound_is_kept_and_what_has_no_room_is_computed(tmp_path: Path, memory: Path) -> None:
    slot = WIDTH * 4 + 20
    bounds = {"cache_bytes": 4096, "cache_disk_bytes": 0}
    config = small_config(tmp_path, steps=STEPS, freeze=BY_HAND.model_copy(update=bounds))
    run = compared(config, ranks=1)
    most = max(r.bytes for r in run.reports if isinstance(r, ActivationsUsed))
    assert slot < most <= 4096
    assert 0 < used(run)[0] < 39, "36 of 64 samples have room"
    assert [*memory.iterdir()] == []
    beside = BY_HAND.model_copy(update={"cache_bytes": 4096})
    assert used(compared(small_config(tmp_path / "disk", steps=STEPS, freeze=beside), ranks=1))[0] == 39


def test_without_any_room_nothing_is_said_to_be_kept(tmp_path: Path) -> None:
    freeze = BY_HAND.model_copy(update={"cache_bytes": 0, "cache_disk_bytes": 0})
    run = compared(small_config(tmp_path, steps=STEPS, freeze=freeze), ranks=1)
    assert {why for _, why in kept(run)} == {"there is no room for any of them"}
    assert used(run) == (0, 0)


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    freeze = BY_HAND.model_copy(update={"cache": str(tmp_path / "file")})
    with pytest.raises(
        JobError, match=r"freeze.cache: cannot keep activations in .*file: Not a directory; name a"
    ):
        run_threads(job(small_config(tmp_path, freeze=freeze)))


@pytest.mark.parametrize(
    ("step", "phase", "found", "alone"),
    [
        (3, FaultPhase.FORWARD, 58, 51),  # as it is filled
        (11, FaultPhase.FORWARD, 52, 33),  # with two layers more
        (11, FaultPhase.IN_COMMIT, 50, 25),
        (14, FaultPhase.BACKWARD, 43, 16),  # as it is read
    ],
)
def test_the_rank_that_takes_the_place_of_a_killed_one_goes_on_from_what_that_kept(
    tmp_path: Path, step: int, phase: FaultPhase, found: int, alone: int
) -> None:
    config = drilled(small_config(tmp_path, steps=STEPS, freeze=BY_HAND))
    cluster = ClusterConfig(
        device="emulated", emulated=EmulatedConfig(forward_s=0.002, input_grad_s=0.0, weight_grad_s=0.0)
    )
    config = config.model_copy(update={"cluster": cluster})
    expected = run_threads(job(without(config)))
    two = job(config, ranks=2, schedule="1f1b", counts=(6, 2))
    folder = cache_folders.CacheFolders(config.job.folder, None, memory=Path("/dev/shm"))._memory_folder
    with RankGroup(config, 3) as group:
        group.arm(0, Fault(kind=FaultKind.KILL, step=step, phase=phase))
        group.train(two, (0, 1), plan=with_standbys(two))
        assert (0, "kill", step, phase) in group.fired
        assert folder.exists()
        reached, _, sources = group.finish_commit()
        ended = group.train(two, (2, 1), plan=with_standbys(two), step=reached, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
        by_other = [r for r in group.of(ActivationsUsed) if r.rank == 2]
        assert sum(r.hits + r.partly for r in by_other) == found > alone, "it would find by itself"
    assert not folder.exists()
    assert not group.of(WarningReport)


COMPUTED_S = 0.03
"""Time in which a microbatch of `slowly_forward` goes through its frozen layers."""


def slowly_forward(tmp_path: Path) -> WorkerConfig:
    """A job that is sent what it keeps sooner than it computes it, but on a busy machine."""
    config = small_config(tmp_path, steps=STEPS, freeze=FreezeConfig(method="prefix", prefix=3))
    slow = EmulatedConfig(forward_s=COMPUTED_S / 3, input_grad_s=0.0, weight_grad_s=0.0)
    return config.model_copy(update={"cluster": ClusterConfig(device="emulated", emulated=slow)})


def test_a_first_rank_on_another_node_is_sent_what_the_one_before_it_kept(
    tmp_path: Path, memory: Path
) -> None:
    """It computes none of them, and from then on has most of them itself."""
    config = drilled(slowly_forward(tmp_path))
    expected = run_threads(job(without(config)))
    two = job(config, ranks=2, schedule="1f1b", counts=(6, 2))
    folder = cache_folders.CacheFolders(config.job.folder, None, memory=Path("/dev/shm"))._memory_folder
    with RankGroup(config, 3, apart={2: memory}) as group:

        def regroup() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) and r.step >= 8 for r in reports))
            group.tell(0, "request", Request.REGROUP)

        group.arm(1, Fault(kind=FaultKind.SLOW, step=10, factor=20.0, steps=STEPS))
        (left,) = parted(group.train(two, (0, 1), meanwhile=regroup))
        assert 8 <= left < 16
        reached, _, sources = group.finish_commit()
        assert reached == left
        ended = group.train(two, (2, 0), step=reached, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
        assert not group.of(WarningReport)
        refused = {r.why_not for r in group.of(ActivationsKept)} - {""}
        assert refused <= {NEIGHBOURS}
        if not refused:
            used = [r for r in group.of(ActivationsUsed) if r.rank == 2]
            passed = 4 * (STEPS - reached)
            assert sum(r.hits + r.partly + r.misses for r in used) == passed
            assert sum(r.fetched for r in used) >= TRIES
            assert used[0].fetch_s > 0.0
            if used[-1].fetch_s < COMPUTED_S:
                assert sum(r.hits for r in used) == passed
                # An epoch has 32 microbatches of two samples, whose neighbour may have come before.
                assert 32 <= sum(r.fetched for r in used) < passed
    assert not folder.exists()
    assert [*memory.iterdir()] == []


def test_pipelines_on_several_nodes_are_sent_what_each_other_keeps(tmp_path: Path, memory: Path) -> None:
    """Samples come to another pipeline in another epoch."""
    config = changed(slowly_forward(tmp_path), replicas=2)
    expected = run_threads(job(without(config)))
    with RankGroup(config, 2, apart={1: memory}) as group:
        ended = group.train(job(config), (0, 1))
        assert state_sha256(ended) == expected.state_sha256
        assert not group.of(WarningReport)
        if not {r.why_not for r in group.of(ActivationsKept)} - {""}:
            for rank in (0, 1):
                used = [r for r in group.of(ActivationsUsed) if r.rank == rank]
                assert sum(r.hits + r.partly + r.misses for r in used) == 4 * STEPS
                assert sum(r.fetched for r in used) >= TRIES
                if used[-1].fetch_s < COMPUTED_S:
                    # The first epoch of four steps, and at most one microbatch in 32 asked for after it.
                    assert sum(r.misses for r in used) <= 4 * 4 + AGAIN
                    assert sum(r.fetched for r in used) >= 8
    assert [*memory.iterdir()] == []
