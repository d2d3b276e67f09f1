"""The part of transformers that all architectures use; imported at first use, as its import takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.documents import seen_by_each
from workers.protocol.errors import JobError

ATTENTION = "sdpa"
"""Implementation of attention: `torch.nn.functional.scaled_dot_product_attention`."""

Config = Any
"""A `transformers.PreTrainedConfig`."""


def modeling(model_type: str) -> ModuleType:
    """The module of transformers that defines the models of a type.

    Raises:
        JobError: transformers is not installed.
    """
    return _imported(f"transformers.models.{model_type}.modeling_{model_type}")


@cache
def _imported(name: str) -> ModuleType:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise JobError(
            f'model.family = "huggingface" needs transformers, and {error}: pip install "freshet[huggingface]"'
        ) from error
    logging.set_verbosity_error()  # for good: passes warn too
    return import_module(name)


def parsed(model_class: type[Any], fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields of a model of this class.

    Raises:
        JobError: a field does not fit, or they are of a model of another type.
    """
    config_class = model_class.config_class
    if (type_told := fields.get("model_type", config_class.model_type)) != config_class.model_type:
        raise JobError(
            f"the model's config.json is of type {type_told}, and {model_class.__name__} of type"
            f" {config_class.model_type}, which has other weights: set model.architecture to a class of {type_told}"
        )
    try:
        config = config_class.from_dict(dict(fields))
    except Exception as error:  # each field has a validator of its own, with errors of its own
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise JobError(
            f"the model's config.json does not fit {config_class.__name__}: {first[-1].strip()}"
        ) from error
    # Whatever the file asks for: it may name a kernel to be fetched.
    config._attn_implementation = ATTENTION if model_class._supports_sdpa else "eager"
    return config


def class_named(name: str) -> type[Any] | None:
    """The model class of transformers of that name; None: it has none.

    Raises:
        JobError: transformers is not installed.
    """
    if name.startswith("TimmWrapper"):  # the model is another library's, which its config names
        return None
    found = getattr(_imported("transformers"), name, None)
    models = _imported("transformers.modeling_utils").PreTrainedModel
    return found if isinstance(found, type) and issubclass(found, models) else None


def sketched(model_class: type[Any], config: Config) -> Any:
    """A model on the meta device, with the parameters that it ties tied."""
    # Not transformers' no_init_weights, which replaces functions of torch for all threads.
    with torch.device("meta"):
        return model_class(config)


def materialized(module: nn.Module) -> nn.Module:
    """`module`, made on the meta device, with memory on the CPU and no values; what is one tensor stays one."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    empty = made.get(id(tensor))
                    if empty is None:
                        empty = torch.empty_like(tensor, device="cpu")
                        if isinstance(tensor, nn.Parameter):
                            empty = nn.Parameter(empty, tensor.requires_grad)
                        made[id(tensor)] = empty
                    held[name] = empty  # type: ignore[assignment]
    return module


@torch.no_grad()
def draw_(module: nn.Module, model_class: type[Any], config: Config, *, given: Iterable[Tensor] = ()) -> None:
    """Set the tensors of `module` to the initial values that transformers draws for them in a model of this class, from
    torch's global generator.

    Args:
        given: tensors of it that have their values, and for which nothing is drawn.
    """
    model: Any = model_class.__new__(model_class)  # pyright: ignore[reportCallIssue]
    nn.Module.__init__(model)
    model.config = config
    flagged = [*{id(tensor): tensor for tensor in given}.values()]
    for tensor in flagged:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        module.apply(model._init_weights)
    finally:
        for tensor in flagged:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def causal_mask(
    config: Config, hidden: Tensor, kind: str, mask: Tensor | None, positions: Tensor | None
) -> Any:
    """The mask of a decoder's attention, as transformers makes it; None where the kernel's own causal one does.

    Args:
        hidden: float[B, T, D].
        kind: "full_attention" or "sliding_attention".
        mask: int64[B, T], 0 where there is padding; with positions the number of each token's document, from 1. None:
            there is neither.
        positions: int64[B, T], in the documents; None: 0 to T - 1.
    """
    if mask is not None and positions is not None:
        # As transformers makes it of positions that begin again, without a look at their values.
        return seen_by_each(mask, config.sliding_window if kind == "sliding_attention" else None)
    masks = _imported("transformers.masking_utils")
    make = (
        masks.create_sliding_window_causal_mask if kind == "sliding_attention" else masks.create_causal_mask
    )
    return make(config, hidden, mask, None, position_ids=positions)


def two_way_mask(config: Config, hidden: Tensor, mask: Tensor | None) -> Any:
    """The mask of an encoder's attention, as transformers makes it; None where nothing is masked.

    Args:
        hidden: float[B, T, D].
        mask: as in `causal_mask`.
    """
    return _imported("transformers.masking_utils").create_bidirectional_mask(config, hidden, mask)


def model_keys(module: ModuleType, name: str, config: Config, keys: Iterable[str]) -> dict[str, str]:
    """The name in the model of transformers of each tensor of a file, as transformers renames them when it loads: with
    or without the base model's prefix, and as earlier versions called them.

    Raises:
        JobError: transformers would compute the model's tensors of the file's.
    """
    conversions, loading = (
        _imported(f"transformers.{each}") for each in ("conversion_mapping", "core_model_loading")
    )
    model = sketched(getattr(module, name), config)
    transforms = conversions.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    known = model.state_dict()
    found: dict[str, str] = {}
    for key in keys:
        renamed, computed = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if computed is not None:
            raise JobError(
                f"{key} of the model's files is of an earlier layout: load the model with transformers and save it"
                " again"
            )
        found[key] = renamed
    return found
