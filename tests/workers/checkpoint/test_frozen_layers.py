"""Checkpoints write frozen layers once, and any of them gives back all bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, small_config
from saved_checkpoints import NAMES, PLAN, alter, job_folder, manifest, trained
from test_checkpoint_agreement import Ranks

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import (
    DamagedCheckpointError,
    checkpoint_folder,
    checkpoints,
    export,
    prune,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint.frozen_layers import FrozenLayers
from workers.checkpoint.kept_files import KeptFiles, check_kept
from workers.checkpoint.manifest import FileRecord, Manifest, layer_files
from workers.checkpoint.saving import CheckpointSaver
from workers.config import CheckpointConfig, FreezeConfig, WorkerConfig
from workers.fault_injection.points import FaultPoints
from workers.launch.ranks import LaunchedRun
from workers.protocol.carried import Carried
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.reports import CheckpointReport, Report
from workers.state.layer_state import LayerState, digest, host_copy
from workers.step import between_steps

SCHEDULE = ((2, 3), (5, 5), (8, 0))
"""Freezing, more of it, none."""
PREFIXES = {1: 3, 2: 3, 3: 3, 4: 5, 5: 5, 6: 5, 7: 0, 8: 0, 9: 0}
"""Steps -> frozen layers of the next."""
SHAPES: Mapping[str, dict[str, Any]] = {
    "buffers": {"trait": "batchnorm"},
    "tied": {"trait": "tied"},
    "bfloat16": {"precision": "bfloat16"},
    "replicas": {"replicas": 2},
    "shards": {"replicas": 2, "shard": "optimizer"},
}


def config_of(folder: Path, keep: int = 9, **changes: Any) -> WorkerConfig:
    freeze = FreezeConfig(method="prefix", schedule=SCHEDULE)
    checkpoint = CheckpointConfig(every_steps=1, keep=keep)
    return small_config(folder, **{"steps": 9, "freeze": freeze, "checkpoint": checkpoint, **changes})


def run(config: WorkerConfig, ranks: int = 2, **fields: Any) -> LaunchedRun:
    work = job(config, ranks=ranks, schedule="1f1b", **fields)
    return run_threads(replace(work, plan=replace(work.plan, shard=config.pipeline.shard)))


def kept(folder: Path) -> dict[str, int]:
    """Files that checkpoints share, with their sizes."""
    return {path.name: path.stat().st_size for path in (folder / "checkpoints" / "kept").iterdir()}


def test_only_layers_that_train_are_written_and_only_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    host_copy = between_steps.host_copy

    def counted(state: LayerState) -> LayerState:
        copied.append(state.layer)
        return host_copy(state)

    monkeypatch.setattr(between_steps, "host_copy", counted)
    ran = run(config_of(tmp_path))
    found = {ref.step: read_manifest(ref) for ref in checkpoints(str(tmp_path))}
    written = {report.step: report.bytes for report in ran.reports if isinstance(report, CheckpointReport)}
    assert [*sorted(found)] == [*sorted(written)] == [*PREFIXES]
    seen, copies = set[str](), dict.fromkeys(range(8), 0)
    for step, frozen in PREFIXES.items():
        files = found[step].files
        layers = {layer: [files[name] for name in layer_files(layer, f"l{layer}")] for layer in range(8)}
        assert {layer for layer in layers if all(file.shared for file in layers[layer])} == {*range(frozen)}
        new = [file for file in files.values() if not file.shared or file.sha256 not in seen]
        assert written[step] == sum(file.bytes for file in new)
        # The first checkpoint with a frozen layer writes it, and none that follows.
        already = PREFIXES.get(step - 1, 0)
        assert {file.name for file in new} == {
            file.name for layer in range(min(already, frozen), 8) for file in layers[layer]
        }
        folder = tmp_path / "checkpoints" / f"step-{step:08d}-gen-1"
        on_disk = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        assert on_disk == {file.name: file.bytes for file in files.values() if not file.shared}
        seen |= {file.sha256 for file in files.values() if file.shared}
        for layer in range(min(already, frozen), 8):
            copies[layer] += 1
    assert {name.partition(".")[0] for name in kept(tmp_path)} == seen
    assert {layer: copied.count(layer) for layer in range(8)} == copies
    # A third of what it was, in bytes: five layers of eight are frozen, and the last is small.
    assert (written[3], written[5], written[8]) == (123_244, 62_716, 214_036)
    assert written[8] == sum(file.bytes for file in found[5].files.values())


# After checkpoints that share, and once thawed.
@pytest.mark.each_choice
@pytest.mark.parametrize("shape", ["bfloat16", "buffers", "replicas", "tied", "shards"])
@pytest.mark.parametrize(("stop_at", "ranks"), [(5, 1), (8, 2)])
def test_a_checkpoint_that_names_files_of_earlier_ones_gives_the_usual_bits(
    shape: str, stop_at: int, ranks: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "whole", **SHAPES[shape], checkpoint=CheckpointConfig())
    expected = run(config).state_sha256
    folder = tmp_path / f"stopped-{stop_at}"
    again = config_of(folder, keep=1, **SHAPES[shape])
    run(again, stop_at=stop_at)
    (newest,) = checkpoints(str(folder))
    files = read_manifest(newest).files.values()
    shared = {f"{file.sha256}.safetensors": file.bytes for file in files if file.shared}
    assert len(shared) == 2 * PREFIXES[stop_at]
    assert kept(folder) == shared, "files that no checkpoint names any more are gone"
    elsewhere = changed(again, output=str(tmp_path / f"resumed-{stop_at}"))
    resumed = run(again if ranks == 1 else elsewhere, ranks, start=newest, generation=2)
    assert resumed.state_sha256 == expected
    written = {
        report.step: report.bytes for report in resumed.reports if isinstance(report, CheckpointReport)
    }
    if ranks == 1 and shape not in (
        "buffers",
        "tied",
    ):  # what was there in the job's folder is not written again
        assert written[6] < written[7] / 3


def saved(output: str, step: int, states: list[LayerState], frozen: KeptFiles | None) -> list[FileRecord]:
    """Write a checkpoint of which the first two layers are frozen."""
    folder = checkpoint_folder(output, step, 1)
    records = [
        record
        for state in states
        for record in write_layer(folder, state, frozen if state.layer < 2 else None)
    ]
    write_manifest(folder, manifest(step, 1, records))
    return records


@pytest.mark.parametrize("kind", ["path", "uri"])
def test_shared_files_live_as_long_as_a_checkpoint_names_them(kind: str, tmp_path: Path) -> None:
    output, files = job_folder(kind, tmp_path), KeptFiles()
    frozen = [trained(layer, 1) for layer in (0, 1)]
    for step in (20, 40, 60):
        records = saved(output, step, [*frozen, trained(2, step)], files)
        assert [record.written_bytes > 0 for record in records] == [step == 20] * 4 + [True] * 2
    before = kept(tmp_path / "run")
    prune(output, keep=1)
    (newest,) = checkpoints(output)
    read = read_manifest(newest)
    assert kept(tmp_path / "run") == before
    for layer, state in enumerate([*frozen, trained(2, 60)]):
        assert digest(read_layer(newest, read, layer)) == digest(state)
        assert read_layer(newest, read, layer).updates == state.updates
    export(output, str(tmp_path / "weights.safetensors"))
    # It thaws: nothing names the files any more once the checkpoint that did is gone.
    saved(output, 80, [trained(layer, 80) for layer in range(3)], None)
    prune(output, keep=1)
    assert kept(tmp_path / "run") == {}


def test_what_others_are_still_writing_stays(tmp_path: Path) -> None:
    """A rank is ahead with the next checkpoint while the first one completes the one before, and deletes old ones."""
    output = str(tmp_path)
    saved(output, 20, [trained(layer, 20) for layer in range(3)], None)
    ahead = write_layer(checkpoint_folder(output, 60, 1), trained(0, 60), KeptFiles())
    saved(output, 40, [trained(layer, 40) for layer in range(3)], KeptFiles())
    prune(output, keep=1)
    check_kept(checkpoint_folder(output, 60, 1), ahead)
    assert len(kept(tmp_path)) == 4 + 2


def test_a_checkpoint_whose_shared_file_is_gone_is_not_completed_and_the_next_one_is(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, frozen=1)
    ranks.save(2)
    ranks.commit(3)
    ranks.save(4)
    gone = sorted((tmp_path / "checkpoints" / "kept").iterdir())[0]
    gone.unlink()
    for step in (5, 6):
        ranks.commit(step)
    told = [(one.step, one.error) for one in ranks.told if isinstance(one, CheckpointReport)]
    assert told[0] == (2, None)
    assert told[1][0] == 4
    assert f"has lost {gone.name}, which this checkpoint shares" in str(told[1][1])
    last = ranks.save(8)
    ranks.commit(9)
    # Once the first rank has nothing to write, the other one's time counts.
    ranks.save(10)
    ranks.commit(11)
    report = ranks.told[-1]
    assert isinstance(report, CheckpointReport)
    assert (report.step, report.seconds) == (10, ranks.slowest_s)
    assert report.seconds > 1e-4
    newest = checkpoints(str(tmp_path))[1]
    assert newest.path == last
    for layer, state in enumerate(ranks.layers):
        assert digest(read_layer(newest, read_manifest(newest), layer)) == digest(state)


def test_shared_files_stay_while_a_checkpoint_is_under_way_that_has_found_them(tmp_path: Path) -> None:
    """Layers freeze, thaw and freeze as they were before the first rank has completed what was written meanwhile."""
    ranks = Ranks(tmp_path, frozen=2, keep=1)
    ranks.save(2)
    ranks.commit(3)
    shared = kept(tmp_path)
    assert shared
    ranks.frozen = 0
    ranks.save(4)
    ranks.frozen = 2
    last = ranks.save(6)
    ranks.commit(7)
    told = [(one.step, one.error) for one in ranks.told if isinstance(one, CheckpointReport)]
    assert told == [(2, None), (4, None), (6, None)]
    (newest,) = checkpoints(str(tmp_path))
    assert newest.path == last
    for layer, state in enumerate(ranks.layers):
        assert digest(read_layer(newest, read_manifest(newest), layer)) == digest(state)
    ranks.commit(8)
    assert kept(tmp_path) == shared
    ranks.frozen = 0
    ranks.save(8)
    ranks.commit(9)
    assert kept(tmp_path) == shared, "a rank that is ahead may have found them for the next one"
    ranks.commit(10)
    assert kept(tmp_path) == {}


@pytest.mark.parametrize("damage", ["altered", "cut off", "gone"])
def test_a_damaged_file_of_a_frozen_layer_is_named_and_written_again(damage: str, tmp_path: Path) -> None:
    output, states = str(tmp_path), [trained(layer, 1) for layer in range(3)]
    records = saved(output, 20, states, KeptFiles())
    name = f"{records[2].sha256}.safetensors"
    path = tmp_path / "checkpoints" / "kept" / name
    if damage == "gone":
        path.unlink()
    elif damage == "altered":
        alter(path)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    (ref,) = checkpoints(output)
    with pytest.raises(DamagedCheckpointError) as error:
        read_layer(ref, read_manifest(ref), 1)
    assert error.value.damage.file == name
    read_layer(ref, read_manifest(ref), 0)
    again = saved(output, 40, states, KeptFiles())
    assert [record.written_bytes > 0 for record in again] == [False, False, True, False, True, True]
    assert digest(read_layer(ref, read_manifest(ref), 1)) == digest(states[1])


def test_records_go_through_commits_and_manifests(tmp_path: Path) -> None:
    records = saved(str(tmp_path), 20, [trained(layer, 1) for layer in range(3)], KeptFiles())
    for record in records:
        heard = FileRecord.heard(record.name, record.told)
        assert (heard, heard.written_bytes) == (record, record.written_bytes)
    (ref,) = checkpoints(str(tmp_path))
    read = read_manifest(ref)
    assert [file.shared for file in read.files.values()] == [True] * 4 + [False] * 2
    assert Manifest.from_json(read.to_json()) == read
    assert tuple(read.layers) == NAMES


@pytest.mark.parametrize("prefix", [0, 2])
def test_ranks_that_do_not_train_share_files_too(prefix: int, tmp_path: Path) -> None:
    output, states = str(tmp_path), [trained(layer, 1) for layer in range(3)]
    saved(output, 20, states, KeptFiles())
    told = list[Report]()
    saver = CheckpointSaver(
        config=config_of(tmp_path),
        rank=0,
        names=NAMES,
        faults=FaultPoints(told.append),
        copies=lambda _, layers, __: [states[layer] for layer in layers],
        carried=lambda _: Carried(prefix=FrozenPrefix(layers=prefix)),
        validations=lambda: (),
        log_sha256=lambda: None,
    )
    folder = checkpoint_folder(output, 40, 2)
    records = saver.save(folder, 40, range(3))
    assert [record.written_bytes == 0 for record in records] == [
        layer < prefix for layer in (0, 0, 1, 1, 2, 2)
    ]
    saver.seal(folder, 40, PLAN, 2, records)
    (newest, _) = checkpoints(output)
    for layer, state in enumerate(states):
        assert digest(read_layer(newest, read_manifest(newest), layer)) == digest(state)


def test_a_layer_counts_as_written_only_while_nothing_of_it_changes(tmp_path: Path) -> None:
    state, known = trained(0, 1), FrozenLayers()
    state.freezing["energy"] = torch.zeros(3)
    known.begin([state], 1)
    records = write_layer(checkpoint_folder(str(tmp_path), 20, 1), state, KeptFiles())
    known.end(records)
    assert known.files_of(state) == records
    assert [record.written_bytes for record in known.files_of(state)] == [0, 0]
    updated, moved, counted = (host_copy(state) for _ in range(3))
    updated.updates["gain"] += 1
    moved.buffers["norm.running_mean"][0] += 1
    counted.freezing["energy"][0] += 1
    for other in (updated, moved, counted, trained(1, 1)):
        assert known.files_of(other) == ()
    assert known.files_of(host_copy(state)) == records
    # A checkpoint in which it was not frozen has files of its own, and the shared ones may go meanwhile.
    known.begin([], 0)
    assert known.files_of(state) == ()
