"""What training does not change is written once for all checkpoints of a job, and read with each of them."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config

from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import (
    DamagedCheckpointError,
    checkpoints,
    read_layer,
    read_manifest,
    write_layer,
)
from workers.checkpoint.manifest import FileRecord, Manifest, layer_files
from workers.config import CheckpointConfig, ModelConfig, WorkerConfig
from workers.state.layer_state import digest

FIXED = ("l0.*", "l1.up.*", "l4.*")
STEPS = 6
LONG_AGO_S = time.time() - 2 * 3600


def config_of(
    folder: Path, keep: int = 9, fixed: tuple[str, ...] | None = FIXED, **changes: Any
) -> WorkerConfig:
    model = ModelConfig(factory="small_models:model", arguments={"trait": "plain"}, fixed=fixed)
    checkpoint = CheckpointConfig(every_steps=2, keep=keep)
    return small_config(folder, model=model, steps=STEPS, checkpoint=checkpoint, **changes)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints" / "kept").iterdir()}


def trained(config: WorkerConfig, ranks: int = 2) -> str:
    return run_threads(job(config, ranks=ranks, schedule="1f1b")).state_sha256


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_checkpoints_share_what_is_fixed_and_hold_all_that_is_trained(precision: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, precision=precision)
    trained(config)
    found = checkpoints(str(tmp_path))
    assert [ref.step for ref in found] == [6, 4, 2]
    kept = [
        {name: each.kept for name, each in read_manifest(ref).files.items() if each.kept is not None}
        for ref in found
    ]
    assert kept[0] == kept[1] == kept[2]
    assert {name[:3] for name in kept[0]} == {"000", "001", "004"}
    assert names(tmp_path) == {each.name for each in kept[0].values()}
    for each in kept[0].values():
        data = (tmp_path / "checkpoints" / "kept" / each.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (each.bytes, each.sha256)
    whole = config_of(tmp_path / "whole", fixed=None, precision=precision)
    trained(whole)
    weights, _ = layer_files(4, "l4")
    sizes = [
        Path(checkpoints(str(folder))[0].path, weights).stat().st_size
        for folder in (tmp_path, tmp_path / "whole")
    ]
    assert sizes[0] < sizes[1] / 5, "the layer has nothing but a header there"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_job_has_the_usual_bits(ranks: int, tmp_path: Path) -> None:
    expected = trained(config_of(tmp_path / "whole"))
    config = config_of(tmp_path / "run")
    run_threads(job(config, ranks=2, schedule="1f1b", stop_at=4))
    (newest, *_) = checkpoints(str(tmp_path / "run"))
    resumed = job(config, ranks=ranks, schedule="1f1b", start=newest, generation=2)
    assert run_threads(resumed).state_sha256 == expected


def test_a_layer_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    trained(config_of(tmp_path))
    (ref, *_) = checkpoints(str(tmp_path))
    manifest = read_manifest(ref)
    states = [read_layer(ref, manifest, layer) for layer in range(8)]
    again = tmp_path / "again" / "checkpoints" / "step-00000006-gen-1"
    records = [record for state in states for record in write_layer(str(again), state)]
    assert {record.name: record for record in records} == manifest.files
    assert len({digest(state) for state in states}) == 8
    # A copy of one of them is not written again.
    kept = next((tmp_path / "again" / "checkpoints" / "kept").iterdir())
    before = kept.stat().st_mtime_ns
    write_layer(str(again.with_name("step-00000008-gen-1")), states[0])
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["altered", "cut off", "gone"])
def test_a_damaged_shared_file_is_named(damage: str, tmp_path: Path) -> None:
    trained(config_of(tmp_path))
    (ref, *_) = checkpoints(str(tmp_path))
    manifest = read_manifest(ref)
    kept = manifest.files[layer_files(4, "l4")[0]].kept
    assert kept is not None
    path = tmp_path / "checkpoints" / "kept" / kept.name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut off" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError) as error:
        read_layer(ref, manifest, 4)
    assert error.value.damage.file == kept.name
    read_layer(ref, manifest, 2)


def test_a_file_that_no_checkpoint_names_any_more_goes_with_the_last_that_did(tmp_path: Path) -> None:
    stray = tmp_path / "checkpoints" / "kept" / f"{'0' * 64}.safetensors"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"of a checkpoint that was never whole")
    os.utime(stray, (LONG_AGO_S, LONG_AGO_S))
    fresh = stray.with_name(f"{'1' * 64}.safetensors")
    fresh.write_bytes(b"of one that may become whole")
    other = stray.with_name("notes.txt")
    other.write_text("not ours")
    trained(config_of(tmp_path, keep=1))
    assert [ref.step for ref in checkpoints(str(tmp_path))] == [6]
    assert not stray.exists()
    assert other.exists()
    assert fresh.exists()
    assert len(names(tmp_path)) == 2 + 3


def test_what_a_killed_writer_left_of_a_shared_file_goes_once_nobody_can_be_writing_it(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "checkpoints" / "kept"
    kept.mkdir(parents=True)
    left, fresh = (kept / f".{name * 64}.safetensors.0a1b2c3d.partial" for name in "ab")
    left.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(left, (LONG_AGO_S, LONG_AGO_S))
    trained(config_of(tmp_path, keep=1))
    assert not left.exists()
    assert fresh.exists()


def test_records_go_through_commits_and_manifests(tmp_path: Path) -> None:
    trained(config_of(tmp_path))
    (ref, *_) = checkpoints(str(tmp_path))
    manifest = read_manifest(ref)
    assert Manifest.from_json(manifest.to_json()) == manifest
    for name, record in manifest.files.items():
        assert FileRecord.heard(name, record.told) == record
    odd = manifest.to_json().replace('"kept"', '"Kept"', 1)
    with pytest.raises(ValueError, match="was altered"):
        Manifest.from_json(odd)


def test_a_shared_file_that_is_damaged_is_written_again_by_the_next_who_has_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    trained(config)
    (newest, *_) = checkpoints(str(tmp_path))
    states = [read_layer(newest, read_manifest(newest), layer) for layer in range(8)]
    for path in (tmp_path / "checkpoints" / "kept").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for state in states:
        write_layer(str(tmp_path / "checkpoints" / "step-00000008-gen-1"), state)
    for layer, state in enumerate(states):
        assert digest(read_layer(newest, read_manifest(newest), layer)) == digest(state)
