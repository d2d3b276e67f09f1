"""Adapters of a trained model: written as peft has them, or merged into the matrices beside which they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.models.huggingface.architecture import Model, SourceLayer
from workers.models.huggingface.target import appearing
from workers.models.lora import BASE, FIRST, SECOND, imported_peft
from workers.models.lora_config import Lora

FILE = "adapter_model.safetensors"
Read = Callable[[int], Mapping[str, Tensor]]
"""Number of a layer -> its weights and buffers."""
_TASKS = {"language": "CAUSAL_LM", "sequence-classification": "SEQ_CLS", "question-answering": "QUESTION_ANS"}
"""Task of a model -> peft's name for it, where it has one."""


def merged(read: Read, lora: Lora) -> Read:
    """`read` of the model without adapters: W + alpha / rank * B A in float32, where there is one (Hu et al. 2021,
    section 4.1)."""

    def tensors(layer: int) -> Mapping[str, Tensor]:
        found = read(layer)
        made: dict[str, Tensor] = {}
        for name, tensor in found.items():
            if ".lora_" in name:
                continue
            path, base, last = name.partition(BASE)
            first, second = (found.get(f"{path}{part}weight") for part in (FIRST, SECOND))
            if base and last == "weight" and first is not None and second is not None:
                change = second.float() @ first.float() * (lora.alpha / lora.rank)
                # Conv1D of transformers keeps its matrix the other way around.
                change = change if change.shape == tensor.shape else change.t()
                tensor = tensor.float() + change
            made[f"{path}.{last}" if base else name] = tensor
        return made

    return tensors


def write_adapter(
    model: Model,
    layers: Sequence[SourceLayer],
    read: Read,
    out: Path,
    lora: Lora,
    *,
    base: str | None,
    dtype: torch.dtype | None,
) -> tuple[int, int, tuple[str, ...]]:
    """Write the adapters, and what is trained as it is, into the folder `out`, as `save_pretrained` of peft does.

    Args:
        base: folder or name of the model that they belong to.
        dtype: of the tensors; None: as they are trained.

    Returns:
        (number of tensors, their bytes, no files).

    Raises:
        JobError: peft is not installed; `out` holds something; or a module is trained in parts, which peft has no form
            for.
        OSError: it cannot be written.
    """
    peft = imported_peft()
    tensors: dict[str, Tensor] = {}
    whole: set[str] = set()
    for number, layer in enumerate(layers):
        for name, tensor in read(number).items():
            if ".lora_" in name:
                key = layer.source_key(name).replace(".default.", ".")
            elif any(fnmatchcase(f"{layer.name}.{name}", pattern) for pattern in lora.train):
                key = layer.source_key(name)
                whole.add(key.rpartition(".")[0])
            else:
                continue
            kept = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            tensors[f"base_model.model.{key}"] = kept.contiguous()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[*lora.targets],
        modules_to_save=sorted({path.rpartition(".")[2] for path in whole}) or None,
        task_type=_TASKS.get(model.task),
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with appearing(out) as part:
        save_file(tensors, part / FILE, {"format": "pt"})
        config.save_pretrained(part)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values()), ()
