"""From `[model]` to a `ModelDefinition`. Knows nothing of stages."""

from __future__ import annotations

from workers.models.definition import ModelDefinition
from workers.models.families.user_factory import FactoryConfig
from workers.models.fixed import with_fixed
from workers.models.lora import with_lora
from workers.models.model_config import AnyModel, families
from workers.protocol.errors import JobError


def build_definition(config: AnyModel, vocabulary: int | None) -> ModelDefinition:
    """The model that `config` describes; nothing is built yet.

    `vocabulary` is the tokenizer's, None where there are no tokens; `model.vocabulary` goes before it.

    Raises:
        JobError: neither family nor factory, sizes that do not fit, a factory that fails.
    """
    if isinstance(config, FactoryConfig) and config.factory is None:
        raise JobError(
            f"the spec names no model: set model.family to {families()}, or model.factory to"
            " package.module:function"
        )
    definition = config.definition(vocabulary)
    if config.lora is not None:
        definition = with_lora(definition, config.lora)
    return with_fixed(definition, config.fixed) if config.fixed else definition
