"""LoRA: small matrices beside large ones that stay (Hu et al. 2021), put into each layer as it is built.

The modules are those of peft, whose adapters can be loaded and written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.lora_config import Lora
from workers.protocol.errors import JobError
from workers.state.layer_state import ParameterRef

BASE, FIRST, SECOND = ".base_layer.", ".lora_A.default.", ".lora_B.default."
"""Parts of parameter names that peft adds: of the matrix that stays, of A and of B."""


def with_lora(definition: ModelDefinition, lora: Lora) -> ModelDefinition:
    """`definition` with adapters beside the modules that `lora` names; all else stays, but what `lora.train` names."""
    layers = tuple(
        LayerBuilder(layer.name, partial(_with_adapters, layer, lora)) for layer in definition.layers
    )
    return replace(definition, layers=layers, lora=lora)


def _with_adapters(builder: LayerBuilder, lora: Lora) -> nn.Module:
    module = builder.build()
    if not isinstance(module, nn.Module):  # it is refused where it is looked at
        return module
    own = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in lora.targets]
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if own:
        _inject(module, own, lora, builder.name)
    for name, parameter in module.named_parameters():
        trained = ".lora_" in name or any(
            fnmatchcase(f"{builder.name}.{name}", pattern) for pattern in lora.train
        )
        parameter.requires_grad_(trained)
    return module


def _inject(module: nn.Module, names: Sequence[str], lora: Lora, layer: str) -> None:
    """Raises JobError where peft is not installed, or a module is of a kind that it has no adapter for."""
    peft: Any = imported_peft()
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=[*names]
    )
    try:
        peft.inject_adapter_in_model(config, module)
    except ValueError as error:
        raise JobError(
            f"model.lora.targets: layer {layer} has {', '.join(names)}, for which peft has no adapter: {error}"
        ) from error


def imported_peft() -> Any:
    """The library.

    Raises:
        JobError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise JobError(
            f"model.lora needs the library peft, which is not installed: {error}; pip install 'freshet[lora]'"
        ) from error
    return peft


def check_lora(lora: Lora, parameters: Collection[ParameterRef]) -> None:
    """Check that each target is a module of the model, and that each pattern of `train` names parameters.

    Args:
        parameters: all of the model's.

    Raises:
        JobError: one names none.
    """
    names = sorted(str(ref) for ref in parameters if ".lora_" not in ref.parameter)
    for pattern in lora.train:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[-4:])
            raise JobError(
                f"model.lora.train has {pattern!r}, which matches none of the {len(names):,} parameters (..., {some}):"
                " a pattern is LAYER.PARAMETER, such as head.*"
            )
    found = {
        ref.parameter.partition(FIRST)[0].rpartition(".")[2] for ref in parameters if FIRST in ref.parameter
    }
    if missing := [target for target in lora.targets if target not in found]:
        linear = {
            ref.parameter.removesuffix(".weight").replace(".base_layer", "").rpartition(".")[2]
            for ref in parameters
            if ref.parameter.endswith(".weight") and ".lora_" not in ref.parameter
        }
        raise JobError(
            f"model.lora.targets has {missing[0]!r}, and no module of the model has that name: there are"
            f" {', '.join(sorted(linear))}"
        )
