"""A trained model as a folder that transformers loads: the same tensors, and the same logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import CONFIGS, fields_of, inputs_of, logits_of, saved_model, section_of, small_model
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from orchestrator.cli.exporting import export_command, export_folder_command
from planner.codec import json_values
from planner.plan import Plan
from workers.build import build_layers
from workers.checkpoint.folder import checkpoint_folder, write_layer, write_manifest
from workers.checkpoint.manifest import Manifest, layer_files
from workers.config import ModelConfig, OptimizerConfig
from workers.models.huggingface.definition import CLASSES
from workers.models.huggingface.target import write_folder
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.protocol.section import Units
from workers.state.layer_state import host_copy
from workers.state.optim import make_optimizer


def saved_run(
    case: str,
    folder: Path,
    units: Units = "blocks",
    told: Mapping[str, Any] | None = None,
    labels: Sequence[str] | None = None,
) -> Path:
    """The output of a job that began with `folder`/model and has changed each of its weights, at step 7.

    Args:
        told: the `[model]` that its manifest tells of; None: its own.
        labels: `data.labels` of the job.
    """
    model = section_of(case, folder / "model", units)
    definition = build_definition(model, None)
    built = build_layers(
        definition,
        range(len(definition.layers)),
        seed=0,
        precision="float32",
        device=torch.device("cpu"),
        optimizer=make_optimizer(OptimizerConfig(), 10),
    )
    at = checkpoint_folder(str(folder / "run"), 7, 1)
    files = []
    for _, state in built.values():
        for weights in state.weights.values():
            weights.detach().mul_(1.25)
        files += write_layer(at, host_copy(state))
    count = len(definition.layers)
    plan = Plan(
        epoch=1,
        version=0,
        reason="first",
        layers=((0, count),),
        stage_ranks=(0,),
        schedule="1f1b",
        chunks=1,
        microbatches=1,
        replicas=1,
    )
    manifest = Manifest(
        step=7,
        generation=1,
        spec={
            "model": told or model.model_dump(mode="json"),
            "job": {"name": "small"},
            "data": {"labels": labels},
        },
        plan=json_values(plan),
        layers=definition.names,
        samples=7,
        files={each.name: each for each in files},
    )
    write_manifest(at, manifest)
    return folder / "run"


def changed(whole: Any) -> Mapping[str, Tensor]:
    """The tensors of transformers' model after the same change of its weights."""
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(1.25)
    return whole.state_dict()


def loaded(case: str, folder: Path) -> Any:
    model = small_model(case)
    model_class = getattr(model.module, model.name)
    found, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return found.train()


@pytest.mark.parametrize(
    ("case", "units"),
    [*((case, "blocks") for case in CONFIGS), ("llama", "halves"), ("vit", "halves")],
)
def test_the_folder_of_a_run_loads_with_equal_logits(case: str, units: Units, tmp_path: Path) -> None:
    whole = saved_model(case, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0"}')
    run = saved_run(case, tmp_path, units)
    expected = changed(whole)
    (line,) = export_folder_command(str(run), str(tmp_path / "out"), format="huggingface", dtype=None)
    assert line.startswith(f"wrote {tmp_path / 'out'}: ")
    assert "of step 7" in line
    assert "tokenizer.json" in line
    found = loaded(case, tmp_path / "out")
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    model = small_model(case)
    inputs = inputs_of(model, padded=model.task != "image-classification")
    for each in (found, whole):
        each.eval()
    assert torch.equal(logits_of(model, found, inputs), logits_of(model, whole, inputs))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert fields_of(tmp_path / "out")["architectures"] == [model.name]


@pytest.mark.parametrize("case", ["llama, tied", "resnet"])
def test_what_was_exported_and_imported_is_exported_to_the_same_bytes(case: str, tmp_path: Path) -> None:
    """In shards, whose index says where each tensor is."""
    saved_model(case, tmp_path / "model")
    written: list[dict[str, bytes]] = []
    for number in range(2):
        definition = build_definition(section_of(case, tmp_path / "model"), None)
        model, architecture = small_model(case), CLASSES[small_model(case).name]
        out = tmp_path / f"out-{number}"
        write_folder(
            model,
            architecture.layers_of(model),
            architecture.ties(model),
            lambda layer, definition=definition: definition.layers[layer].build().state_dict(),
            out,
            source=tmp_path / "model",
            dtype=None,
            shard_bytes=6_000,
        )
        written.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
        (tmp_path / "model").rename(tmp_path / f"before-{number}")
        out.rename(tmp_path / "model")
    first, second = written
    assert first == second
    shards = [name for name in first if name.endswith(".safetensors")]
    assert len(shards) > 2
    index = json.loads(first["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == set(shards)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_reader_of_such_folders_reads_it(tmp_path: Path) -> None:
    """And so does what loads by it, such as torchtitan."""
    whole = saved_model("llama", tmp_path / "model")
    run = saved_run("llama", tmp_path)
    expected = changed(whole)
    export_folder_command(str(run), str(tmp_path / "out"), format="huggingface", dtype=None)
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    torch.testing.assert_close(found, dict(expected), rtol=0.0, atol=0.0)


def test_names_of_classes_are_told(tmp_path: Path) -> None:
    saved_model("bert, sequences", tmp_path / "model")
    run = saved_run("bert, sequences", tmp_path, labels=("bad", "neither", "good"))
    export_folder_command(str(run), str(tmp_path / "out"), format="huggingface", dtype=None)
    told = fields_of(tmp_path / "out")
    assert told["id2label"] == {"0": "bad", "1": "neither", "2": "good"}
    assert told["label2id"] == {"bad": 0, "neither": 1, "good": 2}


def test_numbers_are_written_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    saved_model("llama", tmp_path / "model")
    run = saved_run("llama", tmp_path)
    export_folder_command(str(run), str(tmp_path / "out"), format="huggingface", dtype="bfloat16")
    found = small_model("llama").module.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert fields_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    saved_model("llama", tmp_path / "model")
    run = saved_run("llama", tmp_path)
    (checkpoint,) = (run / "checkpoints").iterdir()
    weights, _ = layer_files(4, "head")
    (checkpoint / weights).write_bytes(b"gone")
    with pytest.raises(JobError, match=r"no checkpoint of .* can be exported"):
        export_folder_command(str(run), str(tmp_path / "out"), format="huggingface", dtype=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("model", r"--out .*/model exists: name a folder that does not, or an empty one"),
        ("s3://bucket/out", "is a URI, and the folder is written on a file system"),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused(out: str, told: str, tmp_path: Path) -> None:
    saved_model("llama", tmp_path / "model")
    run = saved_run("llama", tmp_path)
    with pytest.raises(JobError, match=told):
        export_folder_command(
            str(run), out if "://" in out else str(tmp_path / out), format="huggingface", dtype=None
        )


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {},
            "--format hf is neither safetensors nor the family of the run's model, huggingface: use --format hug",
        ),
        ({"family": "gpt"}, "--format hf is neither .* the run's model, gpt: use --format safetensors"),
        (
            {"family": None, "factory": "models:make"},
            "--format hf is neither .* model, which a factory made: use --format safetensors",
        ),
    ],
)
def test_another_format_is_refused(section: dict[str, Any], told: str, tmp_path: Path) -> None:
    saved_model("llama", tmp_path / "model")
    run = saved_run("llama", tmp_path, told=section)
    with pytest.raises(JobError, match=told):
        export_folder_command(str(run), str(tmp_path / "out"), format="hf", dtype=None)


def test_a_model_of_ours_and_a_type_without_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the run's model is gpt, which no other library defines"):
        ModelConfig(family="gpt").write_folder(lambda layer: {}, tmp_path / "out", None, merge=False)
    with pytest.raises(JobError, match="--dtype bfloat16 belongs to a folder: add --format"):
        export_command(str(tmp_path), str(tmp_path / "out"), force=False, dtype="bfloat16")
