"""`[model]` of a job spec: one of the families, by `family`. No torch here, so that any process can read a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from workers.models.families.family import ModelFamily
from workers.models.families.gpt import GptConfig
from workers.models.families.huggingface import HuggingFaceConfig
from workers.models.families.llama import LlamaConfig
from workers.models.families.user_factory import FactoryConfig
from workers.models.families.vgg import VggConfig
from workers.models.families.vit import VitConfig

AnyModel = GptConfig | LlamaConfig | VitConfig | VggConfig | HuggingFaceConfig | FactoryConfig
"""All families. A new one is a file in `families/`, and its name here."""
DEFAULT_MODEL = GptConfig(family="gpt")
"""The model of a spec without `[model]`."""

MODELS: tuple[type[ModelFamily], ...] = get_args(AnyModel)
FAMILIES: Mapping[str, type[ModelFamily]] = {
    family: model for model in MODELS for family in get_args(model.model_fields["family"].annotation)
}
"""`model.family` -> its section."""
KEYS = frozenset(key for model in MODELS for key in model.model_fields)


_EARLIER = {"family", "factory", "layers", "width", "heads"}
"""Keys that tell a section of an earlier version, which wrote those of all families: nobody sets all of these."""


def families(reads: Literal["tokens", "images"] | None = None) -> str:
    """The names of all families, or of those that read tokens or images: `a, b or c`."""
    *others, last = (name for name, model in FAMILIES.items() if reads in (None, model.reads))
    return f"{', '.join(others)} or {last}" if others else last


def of_one_family(section: Mapping[str, Any]) -> dict[str, Any]:
    """A `[model]` that was written as JSON, without other families' keys.

    Earlier versions wrote the keys of all families, and each ignored those of others.
    """
    own = FAMILIES.get(str(section.get("family")), FactoryConfig).model_fields
    return {key: value for key, value in section.items() if key in own or key not in KEYS}


def _tagged(section: Any) -> Any:
    """`section` with its family, which a model made by a factory need not name."""
    if not isinstance(section, Mapping):
        return section
    family, factory = section.get("family"), section.get("factory")
    if family is not None and factory is not None:
        raise PydanticCustomError(
            "family_and_factory",
            "model.family = {family} and model.factory = {factory} are both set: keep one of them",
            {"family": repr(family), "factory": repr(factory)},
        )
    return {"family": None, **(of_one_family(section) if section.keys() >= _EARLIER else section)}


Model = Annotated[AnyModel, Field(discriminator="family"), BeforeValidator(_tagged)]
"""The section of one family."""


def model_section(section: Mapping[str, Any]) -> AnyModel:
    """The `[model]` that was written as JSON, into a checkpoint for instance."""
    return TypeAdapter(Model).validate_python(of_one_family(section))
