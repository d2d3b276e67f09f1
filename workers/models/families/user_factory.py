"""A model of the user's own: the layers and the loss that a function returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from workers.models.families.family import TextModel
from workers.protocol.section import Arguments

if TYPE_CHECKING:
    from workers.models.definition import ModelDefinition


class FactoryConfig(TextModel):
    """`model.factory`: the layers and the loss that a function of yours returns."""

    reads = None
    cost_keys = ("factory", "arguments")
    family: None = None
    """None of the built-in families."""
    factory: str | None = None
    """`package.module:function` that returns layers and a loss."""
    arguments: Arguments = Field(default={})
    """Keyword arguments for `factory`."""

    @property
    def user_code(self) -> str | None:
        return self.factory

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Layers and loss that the function returns. It draws the same for all seeds, as each process calls it;
        layers draw by `job.seed`."""
        from workers.models.factory_result import as_definition
        from workers.process.import_path import call_import_path
        from workers.process.torch_modes import check_modes_kept
        from workers.reproducibility import rng

        assert self.factory is not None
        origin = f"model.factory = {self.factory!r}"
        with rng.keyed(rng.key(0, "factory")):
            returned = call_import_path(self.factory, self.arguments, "model.factory")
        check_modes_kept(origin)
        return as_definition(returned, origin)
