"""Small models of each architecture, as transformers builds and saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.config import ModelConfig
from workers.data.dataset import Batch
from workers.models.huggingface.architecture import Model
from workers.models.huggingface.definition import model_of
from workers.protocol.section import Units

_DECODER: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_BERT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_IMAGES: dict[str, Any] = {"num_channels": 1, "num_labels": 10}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_DECODER, "attention_dropout": 0.1}),
    "llama, tied": ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True, "pad_token_id": 3}),
    "llama, scaled rotary": (
        "LlamaForCausalLM",
        {**_DECODER, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**_DECODER, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 50,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
        },
    ),
    "bert, sequences": ("BertForSequenceClassification", {**_BERT, "num_labels": 3}),
    "bert, answers": ("BertForQuestionAnswering", _BERT),
    "bert, masked tokens": ("BertForMaskedLM", _BERT),
    "vit": (
        "ViTForImageClassification",
        {
            **_IMAGES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
    "convnext_v2": (
        "ConvNextV2ForImageClassification",
        {
            **_IMAGES,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "num_stages": 2,
            "patch_size": 2,
            "drop_path_rate": 0.2,
        },
    ),
    "resnet": (
        "ResNetForImageClassification",
        {**_IMAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
    ),
    "resnet, bottleneck": (
        "ResNetForImageClassification",
        {
            **_IMAGES,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 1],
            "layer_type": "bottleneck",
            "downsample_in_bottleneck": True,
        },
    ),
}
GENERIC: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            **_BERT,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "use_parallel_residual": False,
        },
    ),
    "opt, tied": (
        "OPTForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "electra, sequences": (
        "ElectraForSequenceClassification",
        {**_BERT, "embedding_size": 16, "num_labels": 3},
    ),
    "distilbert, masked tokens": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 50,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "deit": (
        "DeiTForImageClassification",
        {
            **_IMAGES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
}
"""Those that no file of ours knows."""
CONFIGS |= GENERIC
NO_CHANCE = dict.fromkeys(
    (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "drop_path_rate",
        "dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "qa_dropout",
        "resid_pdrop",
    ),
    0.0,
)
"""Fields that switch off what architectures draw in a pass."""
ROWS, LENGTH, SIDE = 3, 12, 16


def small_model(case: str) -> Model:
    """The model of a case, not built, which draws nothing in a pass."""
    name, fields = CONFIGS[case]
    return model_of({**fields, **NO_CHANCE}, name)


def whole_model(model: Model, seed: int = 0) -> Any:
    """The model of transformers, with drawn weights, in training mode."""
    model_class = getattr(model.module, model.name)
    config = model_class.config_class.from_dict(model.config.to_dict())
    torch.manual_seed(seed)
    return model_class(config).train()


def saved_model(case: str, folder: Path, *, seed: int = 0, **options: Any) -> Any:
    """The model of a case, which `save_pretrained` has written into `folder`."""
    model = whole_model(small_model(case), seed)
    model.save_pretrained(folder, **options)
    return model


def fields_of(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder."""
    return json.loads((folder / "config.json").read_text())


def section_of(case: str, folder: Path, units: Units = "blocks") -> Any:
    """`[model]` of a job that begins with the model of a case in `folder`."""
    return ModelConfig(
        family="huggingface",
        path=str(folder),
        architecture=small_model(case).name,
        config=fields_of(folder),
        context=LENGTH,
        units=units,
    )


def inputs_of(model: Model, *, padded: bool) -> dict[str, Tensor]:
    """A batch, by the names that transformers gives its tensors; padded: the mask too."""
    torch.manual_seed(2)
    if model.task == "image-classification":
        return {"pixel_values": torch.randn(ROWS, 1, SIDE, SIDE)}
    tokens = {"input_ids": torch.randint(4, 50, (ROWS, LENGTH))}
    if padded:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[0, 7:] = mask[2, 3:] = 0
        tokens["input_ids"].masked_fill_(mask == 0, getattr(model.config, "pad_token_id", None) or 0)
        tokens["attention_mask"] = mask
    return tokens


def logits_of(model: Model, whole: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of transformers' model as its `Trainer` computes them in training."""
    # A cache for generation would copy keys and values, and the copies' gradients have other last bits.
    outputs = whole(**inputs, **({"use_cache": False} if model.task == "language" else {}))
    if model.task == "question-answering":
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits


class Samples:
    """A data set for the model of a case: padded texts or images, with random targets."""

    train_samples = 64
    validation_samples = 4

    def __init__(self, case: str) -> None:
        model = small_model(case)
        draws = torch.Generator().manual_seed(4)
        count = self.train_samples + self.validation_samples

        def numbers(end: int, *shape: int) -> Tensor:
            return torch.randint(4, end, (count, *shape), generator=draws)

        if model.task == "image-classification":
            self._inputs: tuple[Tensor, ...] = (torch.randn(count, 1, SIDE, SIDE, generator=draws),)
            mask = torch.ones(0)
        else:
            mask = (torch.arange(LENGTH) < numbers(LENGTH + 1, 1)).long()
            self._inputs = (numbers(50, LENGTH), mask)
        match model.task:
            case "language" | "masked-language":
                self._targets = (numbers(50, LENGTH).where(mask > 0, torch.tensor(-100)),)
            case "question-answering":
                self._targets = (numbers(LENGTH), numbers(LENGTH))
            case _:
                self._targets = (numbers(1000) % model.config.num_labels,)

    def train(self, indices: list[int]) -> Batch:
        return Batch(
            inputs=tuple(each[indices] for each in self._inputs),
            targets=tuple(each[indices] for each in self._targets),
        )

    def validation(self, indices: list[int]) -> Batch:
        return self.train([self.train_samples + index for index in indices])
