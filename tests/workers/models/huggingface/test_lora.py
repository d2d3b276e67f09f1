"""LoRA: adapters train to the bits of a plain loop, all else stays, and peft and transformers read what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import inputs_of, logits_of, saved_model, section_of, small_model
from jobs import even, job, small_config
from masked_data import LENGTH, VOCABULARY
from peft import PeftModel
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.exporting import export_command, export_folder_command
from workers.config import CheckpointConfig, DataConfig, ModelConfig, WorkerConfig
from workers.models.outline import outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn", "c_proj"], "bert, sequences": ["query", "value"]}
LAYERS = 5


def config_of(case: str, folder: Path, precision: str = "float32", **lora: Any) -> WorkerConfig:
    saved_model(case, folder / "model")
    model = section_of(case, folder / "model")
    given = {"rank": 4, "alpha": 8.0, "dropout": 0.1, "targets": TARGETS[case], **lora}
    model = type(model).model_validate({**model.model_dump(), "lora": given})
    data = DataConfig(source="hugging_face_models:Samples", arguments={"case": case})
    checkpoint = CheckpointConfig(every_steps=3)
    return small_config(
        folder / "run", model=model, data=data, steps=3, precision=precision, checkpoint=checkpoint
    )


# Each on one of the two in `make test`.
@pytest.mark.parametrize(
    ("case", "precision", "schedule"),
    [
        pytest.param(*adapted, schedule, marks=pytest.mark.soak if (number + turn) % 2 else ())
        for number, adapted in enumerate(
            [*((case, "float32") for case in TARGETS), ("llama", "bfloat16"), ("gpt2", "bfloat16")]
        )
        for turn, schedule in enumerate(("zb-h1", "1f1b"))
    ],
)
def test_adapters_train_to_the_bits_of_a_plain_loop(
    case: str, precision: str, schedule: str, tmp_path: Path
) -> None:
    config = config_of(case, tmp_path, precision)
    expected, _ = train_plainly(config, tmp_path, boundaries=True)
    counts = (1, 4) if schedule == "1f1b" else even(LAYERS, 2)
    run = run_threads(job(config, ranks=2, schedule=schedule, counts=counts, layers=LAYERS))
    assert run.state_sha256 == expected


def test_nothing_but_adapters_and_what_is_named_is_trained(tmp_path: Path) -> None:
    config = config_of("bert, sequences", tmp_path, train=("head.classifier.*",))
    trained = {
        f"{layer.name}.{name}"
        for layer in build_definition(config.model, None).layers
        for name, parameter in layer.build().named_parameters()
        if parameter.requires_grad
    }
    assert {"head.classifier.weight", "head.classifier.bias"} <= trained
    others = trained - {"head.classifier.weight", "head.classifier.bias"}
    assert len(others) == 3 * 2 * 2
    assert all(".lora_" in name for name in others)


@pytest.mark.parametrize("case", TARGETS)
def test_peft_loads_the_adapter_and_transformers_the_merged_model(case: str, tmp_path: Path) -> None:
    train = ("head.classifier.*",) if case.startswith("bert") else ()
    config = config_of(case, tmp_path, train=train)
    run_threads(job(config, ranks=2, schedule="1f1b", counts=even(LAYERS, 2), layers=LAYERS))
    model = small_model(case)
    of = getattr(model.module, model.name)
    folder = str(tmp_path / "run")
    (line,) = export_folder_command(folder, str(tmp_path / "adapter"), format="huggingface", dtype=None)
    assert line.startswith(f"wrote {tmp_path / 'adapter'}: ")
    export_folder_command(folder, str(tmp_path / "whole"), format="huggingface", dtype=None, merge=True)
    base = of.from_pretrained(tmp_path / "model")
    inputs = inputs_of(model, padded=True)
    before = logits_of(model, base.eval(), inputs)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    whole, info = of.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(info.values()), info
    found = logits_of(model, adapted.base_model.model, inputs)
    assert not torch.allclose(found, before, atol=1e-4), "training changed something"
    torch.testing.assert_close(logits_of(model, whole.eval(), inputs), found, rtol=1e-4, atol=1e-5)
    bytes_of = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert bytes_of < sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.safetensors")) / 3


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    config = config_of("llama", tmp_path, targets=["q_proj", "qproj"])
    with pytest.raises(
        JobError,
        match=r"model.lora.targets has 'qproj', and no module of the model has that name: there are .*k_proj",
    ):
        outline(build_definition(config.model, None))
    config = config_of("llama", tmp_path / "other", targets=["input_layernorm"])
    with pytest.raises(
        JobError, match=r"layer block0 has block.input_layernorm, for which peft has no adapter"
    ):
        outline(build_definition(config.model, None))
    with pytest.raises(JobError, match=r"--merge belongs to a folder"):
        export_command(str(tmp_path), str(tmp_path / "out"), force=False, merge=True)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            ("classifier.*",),
            r"model.lora.train has 'classifier\.\*', which matches none of the \d+ parameters",
        ),
        (("block0.*.bias",), "trains parameters of modules called .*, and .* is not trained whole"),
        (("block2.*",), "trains parameters of modules called .*, and .* is not trained whole"),
    ],
)
def test_what_peft_has_no_form_for_is_refused(train: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """A pattern without a match as the model is built, parts of modules as the adapter is written."""
    config = config_of("bert, sequences", tmp_path, train=train)
    with pytest.raises(JobError, match=told):  # noqa: PT012
        outline(build_definition(config.model, None))
        run_threads(job(config, layers=LAYERS))
        run = str(tmp_path / "run")
        export_folder_command(run, str(tmp_path / "out"), format="huggingface", dtype=None)
    assert not (tmp_path / "out").exists()


def test_a_model_of_ours_has_adapters_too(tmp_path: Path) -> None:
    sizes = {"layers": 3, "width": 16, "heads": 2, "context": LENGTH, "vocabulary": VOCABULARY}
    model = ModelConfig(family="llama", **sizes, lora={"targets": ["gate", "query"]})
    config = small_config(tmp_path, model=model, data=DataConfig(source="masked_data:Masked"))
    expected, _ = train_plainly(config, tmp_path)
    run = run_threads(job(config, ranks=2, schedule="zb-h1", counts=(2, 3), layers=LAYERS))
    assert run.state_sha256 == expected
