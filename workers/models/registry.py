"""From `[model]` to a `ModelDefinition`: the built-in families by name, anything else by import path.

Checks what a user can get wrong before any layer is built; knows nothing of stages.
"""

from __future__ import annotations

from workers.config import ModelConfig
from workers.models.definition import ModelDefinition
from workers.models.factory import as_definition
from workers.models.gpt import gpt
from workers.models.llama import llama
from workers.models.vit import vit
from workers.process.import_path import call_import_path
from workers.process.torch_modes import check_modes_kept
from workers.protocol import JobError
from workers.reproducibility import rng

_FACTORY = rng.key(0, "factory")
"""Key of what a factory draws itself: the same for all seeds, as each process calls it. Layers draw by `job.seed`."""
_FAMILIES = "gpt, llama or vit"


def build_definition(config: ModelConfig, vocabulary: int | None) -> ModelDefinition:
    """The model that `config` describes; nothing is built yet.

    `vocabulary` is the tokenizer's, None where there are no tokens; `config.vocabulary` goes before it.

    Raises:
        JobError: neither or both of family and factory, sizes that do not fit, a factory that fails.
    """
    if config.family is not None and config.factory is not None:
        raise JobError(
            f"model.family = {config.family!r} and model.factory = {config.factory!r} are both set:"
            " keep one of them"
        )
    if config.factory is not None:
        with rng.keyed(_FACTORY):
            returned = call_import_path(config.factory, config.arguments, "model.factory")
        check_modes_kept(f"model.factory = {config.factory!r}")
        return as_definition(returned, f"model.factory = {config.factory!r}")
    if config.family is None:
        raise JobError(
            f"the spec names no model: set model.family to {_FAMILIES}, or model.factory to"
            " package.module:function"
        )
    _check_sizes(config)
    if config.family == "vit":
        return vit(config)
    tokens = config.vocabulary or vocabulary
    if tokens is None:
        raise JobError(
            f"model.family = {config.family!r} needs a vocabulary and the data has no tokens:"
            " set model.vocabulary, or choose a text source such as python-docs"
        )
    return gpt(config, tokens) if config.family == "gpt" else llama(config, tokens)


def _check_sizes(config: ModelConfig) -> None:
    """Raises JobError where sizes do not fit together, or a setting is not one of the family's."""
    if config.arguments:
        raise JobError(
            f"model.arguments are passed to model.factory, and model.family = {config.family!r} takes none:"
            " remove them"
        )
    if config.width % config.heads:
        raise JobError(
            f"model.width = {config.width} is not divisible by model.heads = {config.heads}:"
            f" choose a width of {_multiples(config.width, config.heads)}, or another number of heads"
        )
    if config.family == "llama":
        kv_heads = config.kv_heads or config.heads
        if config.heads % kv_heads:
            raise JobError(
                f"model.heads = {config.heads} is not divisible by model.kv_heads = {kv_heads}:"
                f" choose a number of key and value heads that divides {config.heads}"
            )
        if config.width // config.heads % 2:
            raise JobError(
                f"model.width = {config.width} over model.heads = {config.heads} gives heads of"
                f" {config.width // config.heads}, an odd width that rotary positions cannot halve:"
                f" choose a width of {_multiples(config.width, 2 * config.heads)}"
            )
    elif config.kv_heads is not None:
        raise JobError(f"model.kv_heads is a setting of llama, not of {config.family}: remove it")
    if config.family == "vit":
        if config.image_size % config.patch_size:
            raise JobError(
                f"model.image_size = {config.image_size} is not divisible by"
                f" model.patch_size = {config.patch_size}: choose a patch size that divides it"
            )
        if config.tied_embeddings:
            raise JobError(
                "model.tied_embeddings is a setting of gpt and llama, vit has no tokens: remove it"
            )


def _multiples(number: int, divisor: int) -> str:
    """The nearest multiples of `divisor` on both sides of `number`, in words."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
