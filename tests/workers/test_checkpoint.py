"""The checkpoint format: every bit comes back, every damage is named, only our old ones are deleted."""

from __future__ import annotations

import json
import pickle
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from planner.plan import Plan
from workers.checkpoint import (
    DamagedCheckpointError,
    checkpoint_folder,
    checkpoints,
    discard,
    export,
    prune,
    read_layer,
    read_manifest,
    write_layer,
    write_manifest,
)
from workers.checkpoint_manifest import FileRecord, Manifest, layer_files
from workers.config import OptimizerConfig
from workers.layer_state import LayerState, digest, host_copy, load_
from workers.optim import make_optimizer
from workers.protocol import DamagedCheckpoint, JobError

NAMES = ("embedding", "block-0", "head")
PLAN = Plan(
    epoch=1,
    version=0,
    reason="first",
    layers=((0, 2), (2, 3)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=4,
    replicas=1,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.gain = nn.Parameter(torch.tensor(1.5))


def trained(layer: int, seed: int, config: OptimizerConfig | None = None) -> LayerState:
    torch.manual_seed(seed * 100 + layer)
    optimizer = make_optimizer(config or OptimizerConfig(), 10)
    state = LayerState.of(layer, NAMES[layer], Layer(), optimizer)
    for step in range(3):
        gradients = {name: torch.randn(tensor.shape) for name, tensor in state.weights.items()}
        if step == 1:
            del gradients["gain"]
        optimizer.update_(state, gradients, 1.0, step)
    state.buffers["norm.num_batches_tracked"].add_(3)
    return host_copy(state)


def saved(output: str, step: int, generation: int = 1) -> list[LayerState]:
    """Write a whole checkpoint; returns what it holds."""
    folder = checkpoint_folder(output, step, generation)
    states = [trained(layer, step) for layer in range(len(NAMES))]
    records = [record for state in states for record in write_layer(folder, state)]
    write_manifest(folder, manifest(step, generation, records))
    return states


def manifest(step: int, generation: int, records: list[FileRecord]) -> Manifest:
    return Manifest(
        step=step,
        generation=generation,
        spec={"job": {"name": "rehearsal", "seed": 7}, "optimizer": {"lr": 0.1, "clip_norm": None}},
        plan=json.loads(PLAN.to_json()),
        layers=NAMES,
        samples=32 * step,
        files={record.name: record for record in records},
    )


def assert_same(left: LayerState, right: LayerState) -> None:
    """Equal in every bit of every tensor and in every count."""
    assert (left.layer, left.name, left.updates) == (right.layer, right.name, right.updates)
    assert digest(left) == digest(right)
    assert {name: set(slots) for name, slots in left.slots.items()} == {
        name: set(slots) for name, slots in right.slots.items()
    }
    for name in left.slots:
        assert digest(LayerState(0, "", left.slots[name], {}, {}, {})) == digest(
            LayerState(0, "", right.slots[name], {}, {}, {})
        )


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A job folder, as a local path and through pyarrow's local filesystem."""
    return str(tmp_path / "run") if request.param == "path" else f"file://{tmp_path}/run"


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
    assert (read.format, read.step, read.generation, read.samples) == (1, 20, 1, 640)
    assert read.layers == NAMES
    assert read.spec == {"job": {"name": "rehearsal", "seed": 7}, "optimizer": {"lr": 0.1, "clip_norm": None}}
    assert Plan.from_json(json.dumps(read.plan)) == PLAN
    for layer, state in enumerate(states):
        assert_same(read_layer(ref, read, layer), state)
        assert state.updates["gain"] == 2
    for name, record in read.files.items():
        assert (folder / name).stat().st_size == record.bytes


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    random_bytes = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
    dtypes = (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )  # fmt: skip
    # Arbitrary bit patterns, not-a-number payloads and negative zeros among them.
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
        optimizer.update_(state, gradients, 0.5, 3)
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


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = [file for layer, name in enumerate(NAMES) for file in layer_files(layer, name)]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (alter, "was altered"),
        (truncate, "where the manifest says"),
        (lengthen, "where the manifest says"),
        (empty, "has 0 bytes"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_layer_file_is_named(output: str, tmp_path: Path, file: str, damage, problem: str) -> None:
    saved(output, 20)
    damage(tmp_path / "run/checkpoints/step-00000020-gen-1" / file)
    (ref,) = checkpoints(output)
    read = read_manifest(ref)
    damaged = int(file[:3])
    with pytest.raises(DamagedCheckpointError) as error:
        read_layer(ref, read, damaged)
    assert (error.value.damage.path, error.value.damage.file) == (ref.path, file)
    assert problem in error.value.damage.problem
    assert str(error.value) == f"checkpoint {ref.path} is damaged: {file} {error.value.damage.problem}"
    for layer in set(range(3)) - {damaged}:
        read_layer(ref, read, layer)


def test_the_error_travels_between_processes() -> None:
    damage = DamagedCheckpoint(path="run", file="manifest.json", problem="is missing")
    copy = pickle.loads(pickle.dumps(DamagedCheckpointError(damage)))
    assert copy.damage == damage
    assert str(copy) == "checkpoint run is damaged: manifest.json is missing"


def edited(**changes) -> str:
    """The JSON of a good manifest with some fields changed, and a sha256 that fits."""
    good = manifest(20, 1, [FileRecord(name=file, bytes=1, sha256="0" * 64) for file in FILES])
    return Manifest(**{**vars(good), **changes}).to_json()


def without(field: str) -> str:
    fields = json.loads(edited())
    del fields[field]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (edited()[:-20], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (edited().replace("0.1", "0.2"), "was altered"),
        (without("samples"), "was altered"),
        (without("sha256"), "was altered"),
        (without("format"), "is of format None"),
        (edited(format=2), "is of format 2, where this version reads format 1"),
        (edited(step=-1), "has a wrong step: -1"),
        (edited(step="20"), "has a wrong step: 20"),
        (edited(samples=True), "has a wrong samples: True"),
        (edited(plan=[]), "has a wrong plan"),
        (edited(layers=("embedding", "../../block", "head")), "has a layer name with other characters"),
        (edited(layers=("embedding", "head", "head")), "names a layer twice"),
        (edited(layers=("embedding", "block-0")), "lists other files than its layers have: 002-head"),
        (edited(files={}), "lists other files than its layers have"),
        (
            edited(files={file: FileRecord(name=file, bytes=1, sha256="0" * 63) for file in FILES}),
            "has a wrong record of 000-embedding.weights",
        ),
        (edited(step=30), "is of step 30, generation 1: the folder was renamed"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, problem: str) -> None:
    saved(str(tmp_path), 20)
    (ref,) = checkpoints(str(tmp_path))
    (Path(ref.path) / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpointError) as error:
        read_manifest(ref)
    assert error.value.damage.file == "manifest.json"
    assert problem in error.value.damage.problem


def test_a_manifest_that_is_gone_or_no_text_is_named(tmp_path: Path) -> None:
    saved(str(tmp_path), 20)
    (ref,) = checkpoints(str(tmp_path))
    path = Path(ref.path) / "manifest.json"
    path.write_bytes(b"\xff" + path.read_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not UTF-8 text"):
        read_manifest(ref)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        read_manifest(ref)


def test_no_value_of_the_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    """Every digit and letter inside it, one after the other."""
    text = edited()
    assert Manifest.from_json(text).to_json() == text
    for at, character in enumerate(text):
        if character.isalnum():
            other = "7" if character != "7" else "8"
            with pytest.raises(ValueError):
                Manifest.from_json(text[:at] + other + text[at + 1 :])


def test_keys_that_are_no_strings_and_tuples_survive(tmp_path: Path) -> None:
    text = edited(spec={"model": {10: "ten", 9: "nine"}, "pipeline": {"partition": (2, 1)}})
    assert Manifest.from_json(text).spec == {
        "model": {"10": "ten", "9": "nine"},
        "pipeline": {"partition": [2, 1]},
    }
    with pytest.raises(ValueError, match="JSON"):
        edited(spec={"lr": float("nan")})


def test_newest_first_and_only_whole_ones(output: str, tmp_path: Path) -> None:
    for step, generation in ((20, 1), (100_000_000, 2), (40, 2), (40, 10), (40, 9)):
        saved(output, step, generation)
    write_layer(checkpoint_folder(output, 60, 2), trained(0, 60))
    parent = tmp_path / "run/checkpoints"
    (parent / "step-00000080-gen-x").mkdir()
    (parent / "step-00000090-gen-1").write_text("a file, not a folder")
    assert [Path(ref.path).name for ref in checkpoints(output)] == [
        "step-00000040-gen-10",
        "step-00000040-gen-9",
        "step-100000000-gen-2",
        "step-00000040-gen-2",
        "step-00000020-gen-1",
    ]


def test_prune_keeps_the_newest_and_what_is_not_ours(output: str, tmp_path: Path) -> None:
    for step in (20, 40, 60, 80):
        saved(output, step)
    write_layer(checkpoint_folder(output, 30, 1), trained(0, 30))  # abandoned
    write_layer(checkpoint_folder(output, 70, 1), trained(0, 70))  # abandoned, among those that stay
    write_layer(checkpoint_folder(output, 90, 1), trained(0, 90))  # being written
    parent = tmp_path / "run/checkpoints"
    foreign = [parent / "notes.txt", parent / "best-step-00000020-gen-1", tmp_path / "run/events.jsonl"]
    for path in foreign:
        path.write_text("mine")
    deleted = prune(output, keep=2)
    assert set(deleted) == {checkpoint_folder(output, step, 1) for step in (70, 40, 30, 20)}
    assert [ref.step for ref in checkpoints(output)] == [80, 60]
    assert {path.name for path in parent.iterdir() if path.is_dir()} == {
        "step-00000060-gen-1",
        "step-00000080-gen-1",
        "step-00000090-gen-1",
    }
    assert all(path.read_text() == "mine" for path in foreign)
    assert prune(output, keep=2) == ()


def test_prune_leaves_everything_while_none_is_whole(output: str, tmp_path: Path) -> None:
    assert prune(output, keep=1) == ()
    write_layer(checkpoint_folder(output, 30, 1), trained(0, 30))
    assert prune(output, keep=1) == ()
    assert (tmp_path / "run/checkpoints/step-00000030-gen-1").is_dir()


def test_discard_deletes_one_checkpoint(output: str) -> None:
    saved(output, 20)
    saved(output, 40)
    discard(checkpoint_folder(output, 40, 1))
    discard(checkpoint_folder(output, 60, 1))
    assert [ref.step for ref in checkpoints(output)] == [20]


def test_discard_while_others_write_into_it(output: str) -> None:
    """No error, and what is left is no checkpoint: the next prune takes it."""
    folder = checkpoint_folder(output, 20, 1)
    state = trained(0, 1)
    stop = threading.Event()

    def write_on() -> None:
        while not stop.is_set():
            with suppress(OSError):
                write_layer(folder, state)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(1000):
            discard(folder)
    finally:
        stop.set()
        writer.join()
    assert checkpoints(output) == []
    saved(output, 40)
    prune(output, keep=1)
    assert not Path(folder.removeprefix("file://")).exists()


def test_export_writes_one_file(output: str, tmp_path: Path) -> None:
    saved(output, 20)
    states = saved(output, 40)
    out_file = tmp_path / "deep/er/model.safetensors"
    step, tensors, size = export(output, str(out_file))
    assert (step, tensors, size) == (40, 3 * (5 + 3), out_file.stat().st_size)
    assert [path.name for path in out_file.parent.iterdir()] == ["model.safetensors"]
    with safe_open(out_file, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "40", "name": "rehearsal"}
        assert len(file.keys()) == tensors
        for state in states:
            for key, tensor in {**state.weights, **state.buffers}.items():
                assert torch.equal(file.get_tensor(f"{state.name}.{key}"), tensor)


def test_export_takes_the_one_before_a_damaged_one(output: str, tmp_path: Path) -> None:
    for step in (20, 40, 60):
        saved(output, step)
    alter(tmp_path / "run/checkpoints/step-00000060-gen-1/manifest.json")
    (tmp_path / "run/checkpoints/step-00000040-gen-1" / FILES[2]).unlink()
    damages: list[DamagedCheckpoint] = []
    step, _, _ = export(output, str(tmp_path / "model.safetensors"), damages.append)
    assert step == 20
    assert [(d.path, d.file) for d in damages] == [
        (checkpoint_folder(output, 60, 1), "manifest.json"),
        (checkpoint_folder(output, 40, 1), FILES[2]),
    ]
    truncate(tmp_path / "run/checkpoints/step-00000020-gen-1" / FILES[4])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(JobError, match=r"no checkpoint of .* can be exported: .*manifest.json.*is missing"):
        export(output, str(tmp_path / "model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()


def test_export_of_nothing_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no checkpoint: set checkpoint\.every_steps"):
        export(str(tmp_path), str(tmp_path / "model.safetensors"))


def test_a_checkpoint_that_was_left_behind_is_the_first_to_go(output: str) -> None:
    """Step 20 was damaged, a later generation went on from step 10: its step 12 is the newest."""
    saved(output, 10, 1)
    saved(output, 20, 1)
    saved(output, 12, 2)
    assert [ref.step for ref in checkpoints(output)] == [12, 20, 10]
    prune(output, keep=1)
    assert [ref.step for ref in checkpoints(output)] == [12]
