"""The checkpoint format: every bit of every state is restored, and training goes on from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import small_config
from saved_checkpoints import NAMES, PLAN, Layer, job_folder, manifest, saved, trained

from benchmarks.parts.configs import changed
from planner.codec import from_json
from planner.plan import Plan
from workers.checkpoint.coordination import manifest_mismatch
from workers.checkpoint.folder import (
    checkpoint_folder,
    checkpoints,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint.manifest import FORMAT, FileRecord, Manifest, layer_files
from workers.config import OptimizerConfig
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.state.layer_state import LayerState, digest, host_copy, load_
from workers.state.optim import make_optimizer


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return job_folder(request.param, tmp_path)


def assert_same(left: LayerState, right: LayerState) -> None:
    """Check that both states have the same bits in every tensor and the same counts."""
    assert (left.layer, left.name, left.updates) == (right.layer, right.name, right.updates)
    assert digest(left) == digest(right)
    assert {name: set(slots) for name, slots in left.slots.items()} == {
        name: set(slots) for name, slots in right.slots.items()
    }
    for name in left.slots:
        assert digest(LayerState(0, "", left.slots[name], {}, {}, {})) == digest(
            LayerState(0, "", right.slots[name], {}, {}, {})
        )


def test_a_checkpoint_comes_back_bit_for_bit(output: str, tmp_path: Path) -> None:
    assert checkpoints(output) == []
    states = saved(output, 20)
    (ref,) = checkpoints(output)
    assert (ref.path, ref.step) == (checkpoint_folder(output, 20, 1), 20)
    folder = tmp_path / "run" / "checkpoints" / "step-00000020-gen-1"
    assert {entry.name for entry in folder.iterdir()} == {
        "000-embedding.weights.safetensors",
        "000-embedding.state.safetensors",
        "001-block-0.weights.safetensors",
        "001-block-0.state.safetensors",
        "002-head.weights.safetensors",
        "002-head.state.safetensors",
        "manifest.json",
    }
    read = read_manifest(ref)
    assert (read.format, read.step, read.generation, read.samples) == (FORMAT, 20, 1, 640)
    assert read.layers == NAMES
    assert read.spec == {"job": {"name": "rehearsal", "seed": 7}, "optimizer": {"lr": 0.1, "clip_norm": None}}
    assert from_json(Plan, json.dumps(read.plan)) == PLAN
    for layer, state in enumerate(states):
        assert_same(read_layer(ref, read, layer), state)
        assert state.updates["gain"] == 2
    for name, record in read.files.items():
        assert (folder / name).stat().st_size == record.bytes


def as_written(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def test_a_manifest_of_format_2_names_no_line_of_the_log() -> None:
    files = [file for layer, name in enumerate(NAMES) for file in layer_files(layer, name)]
    made = manifest(20, 1, [FileRecord(name=file, bytes=1, sha256="0" * 64) for file in files])
    fields = json.loads(made.to_json())
    del fields["log_sha256"], fields["sha256"]
    assert Manifest.from_json(as_written({**fields, "format": 2})).log_sha256 is None
    with pytest.raises(ValueError, match="missing or unknown fields: log_sha256"):
        Manifest.from_json(as_written(fields))


def test_a_manifest_of_format_7_shares_no_layer() -> None:
    files = [file for layer, name in enumerate(NAMES) for file in layer_files(layer, name)]
    made = manifest(20, 1, [FileRecord(name=file, bytes=1, sha256="0" * 64) for file in files])
    fields = json.loads(made.to_json())
    del fields["sha256"]
    read = Manifest.from_json(as_written({**fields, "format": 7}))
    assert (read.format, read.files) == (7, made.files)
    assert not any(file.shared for file in read.files.values())


def test_a_manifest_of_format_6_freezes_no_prefix() -> None:
    files = [file for layer, name in enumerate(NAMES) for file in layer_files(layer, name)]
    made = manifest(20, 1, [FileRecord(name=file, bytes=1, sha256="0" * 64) for file in files])
    prefix = FrozenPrefix(layers=2, bound=1.5, sums=(1.0, 2.0))
    written = replace(made, carried=Carried(prefix=prefix)).to_json()
    assert Manifest.from_json(written).carried.prefix == prefix
    fields = json.loads(written)
    del fields["prefix"], fields["sha256"]
    assert Manifest.from_json(as_written({**fields, "format": 6})).carried == Carried()
    with pytest.raises(ValueError, match="missing or unknown fields: prefix"):
        Manifest.from_json(as_written(fields))


def test_what_format_1_calls_bfloat16_is_autocast(output: str) -> None:
    saved(output, 20)
    (ref,) = checkpoints(output)
    fields = vars(read_manifest(ref))
    for written, meant in ((1, "bfloat16-autocast"), (3, "bfloat16")):
        old = Manifest(**{**fields, "format": written, "spec": {"precision": "bfloat16"}})
        assert Manifest.from_json(old.to_json()).spec["job"]["precision"] == meant


def test_a_manifest_of_format_3_has_keys_beside_its_sections(output: str) -> None:
    config = small_config(Path(output), compile=True, replicas=2)
    flat = {"job": config.job.name, "model": config.model.model_dump(mode="json"), "device": "cpu"}
    flat |= config.job.model_dump(mode="json", exclude={"name"})
    flat |= config.pipeline.model_dump(mode="json", include={"microbatch_size", "microbatches", "replicas"})
    flat |= {name: getattr(config, name).model_dump(mode="json") for name in ("data", "optimizer", "freeze")}
    saved(output, 20)
    (ref,) = checkpoints(output)
    old = Manifest(**{**vars(read_manifest(ref)), "format": 3, "spec": flat})
    read = Manifest.from_json(old.to_json())
    assert manifest_mismatch(read, config) == {}
    del flat["compile"]
    uncompiled = Manifest.from_json(replace(old, spec=flat).to_json())
    assert manifest_mismatch(uncompiled, config) == {"job.compile": (False, True)}
    changes = {"seed": 4, "microbatches": 8, "device": "cuda"}
    assert manifest_mismatch(read, changed(config, **changes)).keys() == {
        "job.seed",
        "pipeline.microbatches",
        "cluster.device",
    }


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    random_bytes = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
    dtypes = (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )  # fmt: skip
    # Arbitrary bit patterns, including NaN payloads and negative zeros.
    weights = {str(dtype).removeprefix("torch."): random_bytes.clone().view(dtype) for dtype in dtypes}
    weights |= {
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "matrix.t": torch.randn(4, 6, generator=generator).t(),
        "slice": torch.arange(12.0)[3:7],
    }
    buffers = {"count": torch.tensor(2**62 + 1), "mask": torch.tensor([True, False, True])}
    slots = {name: {"exp_avg": tensor.clone()} for name, tensor in weights.items()}
    state = LayerState(0, NAMES[0], weights, buffers, slots, dict.fromkeys(weights, 2**40))
    folder = checkpoint_folder(str(tmp_path), 1, 1)
    others = [trained(layer, 1) for layer in (1, 2)]
    records = [record for each in (state, *others) for record in write_layer(folder, each)]
    write_manifest(folder, manifest(1, 1, records))
    (ref,) = checkpoints(str(tmp_path))
    read = read_layer(ref, read_manifest(ref), 0)
    assert_same(read, state)
    assert set(read.buffers) == set(buffers)
    for tensor in (*read.weights.values(), *read.buffers.values()):
        assert tensor.is_contiguous()
        assert tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_goes_on_from_it_with_the_same_bits(tmp_path: Path, momentum: float) -> None:
    config = OptimizerConfig(name="sgd", momentum=momentum)
    states = [trained(layer, 1, config) for layer in range(3)]
    folder = checkpoint_folder(str(tmp_path), 3, 1)
    write_manifest(folder, manifest(3, 1, [record for s in states for record in write_layer(folder, s)]))
    (ref,) = checkpoints(str(tmp_path))
    optimizer = make_optimizer(config, 10)
    resumed = LayerState.of(2, "head", Layer(), optimizer)
    load_(resumed, read_layer(ref, read_manifest(ref), 2))
    for state in (resumed, states[2]):
        gradients = {name: torch.ones_like(tensor) for name, tensor in state.weights.items()}
        optimizer.update_(state, gradients, 0.5, optimizer.lr(3))
    assert_same(host_copy(resumed), states[2])


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    for step in (1, 2):
        write_layer(checkpoint_folder(str(tmp_path), step, 1), trained(0, 5))
    for file in layer_files(0, NAMES[0]):
        one, two = (Path(checkpoint_folder(str(tmp_path), step, 1)) / file for step in (1, 2))
        assert one.read_bytes() == two.read_bytes()


def test_a_dtype_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    state = LayerState(0, "embedding", {"w": torch.zeros(2, dtype=torch.complex128)}, {}, {"w": {}}, {"w": 0})
    with pytest.raises(JobError, match=r"000-embedding\.weights\.safetensors cannot hold .*complex128"):
        write_layer(str(tmp_path), state)
