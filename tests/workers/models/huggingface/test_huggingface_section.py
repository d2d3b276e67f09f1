"""`[model]` of the family huggingface: where its folder is found, what it says, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hugging_face_models import CONFIGS, fields_of, saved_model

from workers.config import ModelConfig
from workers.models.families.huggingface import HuggingFaceConfig
from workers.protocol.errors import JobError


def section(**fields: Any) -> HuggingFaceConfig:
    model = ModelConfig(family="huggingface", **fields)
    assert isinstance(model, HuggingFaceConfig)
    return model


def located(path: Path, **fields: Any) -> HuggingFaceConfig:
    return section(path=str(path), context=12, **fields).located(os.path.abspath)


def written(folder: Path, **fields: Any) -> Path:
    """A folder whose config.json has these fields."""
    name, config = CONFIGS["llama"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **config, **fields}))
    return folder


def test_the_folder_s_config_is_part_of_the_settled_section(tmp_path: Path) -> None:
    """Ranks build the model of it, not of what the file says by then."""
    saved_model("llama", tmp_path)
    model = located(tmp_path)
    assert (model.path, model.architecture) == (str(tmp_path), "LlamaForCausalLM")
    assert model.config == fields_of(tmp_path)
    assert model.vocabulary == 50
    (tmp_path / "config.json").unlink()
    assert len(model.definition(50).layers) == 5
    assert HuggingFaceConfig.model_validate_json(model.model_dump_json()) == model


def test_a_name_is_looked_up_in_the_local_cache(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads where the cache is as it is imported."""
    snapshot = tmp_path / "models--somebody--small" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    written(snapshot)
    (tmp_path / "models--somebody--small" / "refs").mkdir()
    (tmp_path / "models--somebody--small" / "refs" / "main").write_text("0123")
    program = (
        "import os; from workers.config import ModelConfig\n"
        "print(ModelConfig(family='huggingface', path='somebody/small').located(os.path.abspath).path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(snapshot)


def test_another_head_has_other_classes(tmp_path: Path) -> None:
    saved_model("bert, sequences", tmp_path)
    assert located(tmp_path).definition(None).layers[-1].build().classifier.out_features == 3  # type: ignore[union-attr]
    model = located(tmp_path, classes=7, pretrained=False)
    assert model.definition(None).layers[-1].build().classifier.out_features == 7  # type: ignore[union-attr]
    with pytest.raises(JobError, match=r"classifier\.weight in .* is \[3, 32\] and \[7, 32\] in the model"):
        located(tmp_path, classes=7).definition(None).layers[-1].build()
    answers = located(tmp_path, architecture="BertForQuestionAnswering").definition(None)
    assert answers.layers[-1].build().outputs.out_features == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("case", CONFIGS)
def test_files_that_are_the_model_s_match_it(case: str, tmp_path: Path) -> None:
    saved_model(case, tmp_path)
    unmatched = located(tmp_path).definition(None).unmatched
    assert unmatched is not None
    assert unmatched() == ((), ())
    assert located(tmp_path, pretrained=False).definition(None).unmatched is None


def test_a_new_head_is_drawn_and_the_old_one_left_over(tmp_path: Path) -> None:
    saved_model("bert, sequences", tmp_path)
    unmatched = located(tmp_path, architecture="BertForQuestionAnswering").definition(None).unmatched
    assert unmatched is not None
    drawn, left_over = unmatched()
    assert drawn == ("qa_outputs.bias", "qa_outputs.weight")
    assert {"classifier.bias", "classifier.weight"} <= {*left_over}
    assert all(name.startswith(("classifier.", "bert.pooler.")) for name in left_over)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"auto_map": {"AutoModel": "x.py"}}, "auto_map: it is code of its own"),
        ({"quantization_config": {"bits": 4}}, "quantized weights, which are not trained here"),
        ({"vision_config": {"a": 1}}, "a vision and a language model in one"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"num_local_experts": 8}, r"num_local_experts = 8\), which are not cut here"),
        ({"moe_num_experts": 8}, r"moe_num_experts = 8\), which are not cut here"),
        ({"audio_config": {"a": 1}}, "an audio and a language model in one"),
        ({"text_config": {"a": 1}}, "several models in one"),
        ({"architectures": []}, "names no class: set model.architecture"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_config(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        located(written(tmp_path, **fields))


def test_a_class_of_another_type_of_model_is_refused(tmp_path: Path) -> None:
    """None of the folder's tensors would be its own."""
    saved_model("bert, sequences", tmp_path)
    told = r"config\.json is of type bert, and RobertaForQuestionAnswering of type roberta, which has other weights"
    with pytest.raises(JobError, match=told):
        located(tmp_path, architecture="RobertaForQuestionAnswering").definition(None)


def test_an_unknown_class_is_refused_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"T5Model.*BertForMaskedLM, .*ViTForImageClassification"):
        located(written(tmp_path, architectures=["T5Model"])).definition(None)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"needs model\.path"):
        section().located(os.path.abspath)
    with pytest.raises(JobError, match=r"has no config\.json: name a folder that save_pretrained wrote"):
        located(tmp_path)
    with pytest.raises(JobError, match="neither a folder here nor a model in the local cache"):
        located(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        JobError, match=r"holds an adapter .* merge it with peft into the model that it belongs to"
    ):
        located(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobError, match=r"config\.json cannot be read"):
        located(tmp_path)


def test_more_tokens_or_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    model = located(written(tmp_path))
    with pytest.raises(JobError, match=r"data\.tokenizer has 256 tokens, and the model's embedding 50"):
        model.definition(256)
    with pytest.raises(JobError, match=r"model\.context = 64 is more than the 32 positions"):
        model.model_copy(update={"context": 64}).definition(50)


def first_layer(folder: Path) -> None:
    located(folder).definition(None).layers[0].build()


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    with pytest.raises(JobError, match=r"neither model\.safetensors nor .*model\.pretrained = false"):
        first_layer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(JobError, match=r"pytorch_model\.bin, which is pickled: load it with transformers"):
        first_layer(folder)
    saved_model("llama", folder, max_shard_size="20KB")
    first_layer(folder)
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(JobError, match=r"cannot be read as safetensors"):
        first_layer(folder)
    shard.unlink()
    with pytest.raises(JobError, match=r"lacks model-00001-of-.*, which its index names"):
        first_layer(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(JobError, match=r"index\.json cannot be read"):
        first_layer(folder)


def test_a_spec_is_read_without_transformers_or_torch(tmp_path: Path) -> None:
    program = (
        "import os, sys; from workers.config import ModelConfig\n"
        f"ModelConfig(family='huggingface', path={str(written(tmp_path))!r}).located(os.path.abspath)\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
