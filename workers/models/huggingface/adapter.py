"""Adapters of a trained model: written as peft has them, or merged into the matrices beside which they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.models.huggingface.architecture import Model, SourceLayer
from workers.models.huggingface.target import appearing
from workers.models.lora import BASE, FIRST, SECOND, imported_peft
from workers.models.lora_config import Lora
from workers.protocol.errors import JobError

FILE = "adapter_model.safetensors"
Read = Callable[[int], Mapping[str, Tensor]]
"""Number of a layer -> its weights and buffers."""
_TASKS = {"language": "CAUSAL_LM", "sequence-classification": "SEQ_CLS", "question-answering": "QUESTION_ANS"}
"""Task of a model -> peft's name for it, where it has one."""


def merged(layers: Sequence[SourceLayer], read: Read, lora: Lora) -> Read:
    """`read` of the model without adapters: W + alpha / rank * B A in float32, where there is one (Hu et al. 2021,
    section 4.1).

    Raises (as it is called):
        JobError: an adapter lies beside something else than a matrix.
    """

    def tensors(layer: int) -> Mapping[str, Tensor]:
        found = read(layer)
        with torch.device("meta"):
            module = layers[layer].make()
        made: dict[str, Tensor] = {}
        for name, tensor in found.items():
            if ".lora_" in name:
                continue
            path, base, last = name.partition(BASE)
            first, second = (found.get(f"{path}{part}weight") for part in (FIRST, SECOND))
            if base and last == "weight" and first is not None and second is not None:
                if tensor.dim() != 2:
                    raise JobError(
                        f"--merge: {path} of layer {layers[layer].name} is {list(tensor.shape)}, and only adapters of"
                        " matrices are merged here: export the adapter, and merge it with peft"
                    )
                change = second.float() @ first.float() * (lora.alpha / lora.rank)
                transposed = type(module.get_submodule(path)).__name__ == "Conv1D"
                tensor = tensor.float() + (change.t() if transposed else change)
            made[f"{path}.{last}" if base else name] = tensor
        return made

    return tensors


def _saved_modules(modules: Mapping[str, Set[bool]], lora: Lora) -> list[str]:
    """The names of the modules that are trained as they are, which peft goes by.

    Args:
        modules: path of each module -> whether its parameters are.

    Raises:
        JobError: one is trained in part, has an adapter, or has the name of one that is not trained.
    """
    names = {path.rpartition(".")[2] for path, trained in modules.items() if True in trained}
    for path, trained in modules.items():
        name = path.rpartition(".")[2]
        if name in names and (trained != {True} or name in lora.targets):
            raise JobError(
                f"model.lora.train trains parameters of modules called {name}, and {path} is not trained whole: peft"
                " has no form for that; write the whole model (--merge)"
            )
    return sorted(names)


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
    modules: dict[str, set[bool]] = {}
    """Path of a module in the model of transformers -> whether its parameters are trained as they are."""
    for number, layer in enumerate(layers):
        for name, tensor in read(number).items():
            key = layer.source_key(name)
            if ".lora_" in name:
                key = key.replace(".default.", ".")
            else:
                trained = any(fnmatchcase(f"{layer.name}.{name}", pattern) for pattern in lora.train)
                modules.setdefault(key.replace(BASE, ".").rpartition(".")[0], set()).add(trained)
                if not trained:
                    continue
            kept = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            tensors[f"base_model.model.{key}"] = kept.contiguous()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[*lora.targets],
        modules_to_save=_saved_modules(modules, lora) or None,
        task_type=_TASKS.get(model.task),
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with appearing(out) as part:
        save_file(tensors, part / FILE, {"format": "pt"})
        config.save_pretrained(part)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values()), ()
