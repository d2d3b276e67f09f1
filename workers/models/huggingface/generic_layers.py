"""Layers of a model without a file of its own: the class's own forward pass in each, with stand-ins for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.documents import with_where
from workers.models.huggingface.architecture import Task
from workers.models.huggingface.stand_ins import BlockReached, GivenHidden, HiddenPlace, argument_at
from workers.protocol.errors import JobError

TOKENS, MASK, SEGMENTS, IMAGES = "input_ids", "attention_mask", "token_type_ids", "pixel_values"
"""Names that transformers gives to the tensors of a batch."""


@dataclass(frozen=True)
class Passing:
    """Tensors that pass between the layers of a model."""

    names: tuple[str, ...]
    """Tensors of a batch that the model takes."""
    travels: tuple[str, ...]
    """Names of those that go on with the hidden states."""
    place: HiddenPlace
    """Argument of a block that is the hidden states."""
    beside: tuple[Any, ...] | None
    """Rest of what a block returns, after the hidden states; None: it returns nothing but them."""
    image: tuple[int, ...]
    """[C, H, W] of an image; empty: it takes none."""

    def inputs(self, hidden: Tensor, where: Sequence[Tensor]) -> dict[str, Tensor]:
        """The model's inputs in a layer after the first one, with zeros in place of those that do not travel.

        Args:
            hidden: float[B, T, D].
            where: those that travel.
        """
        found = dict(zip(self.travels, where, strict=False))
        if TOKENS in self.names and TOKENS not in found:
            nothing = torch.zeros((), dtype=torch.long, device=hidden.device)
            found[TOKENS] = nothing.expand(hidden.shape[:2])
        if self.image:
            found[IMAGES] = hidden.new_zeros(()).expand(len(hidden), *self.image)
        return found


class GenericEmbedding(nn.Module):
    """All that comes before the blocks.

    Input: tokens int64[B, T], then the mask int64[B, T], then the segments int64[B, T], if any; or images. Tokens that
    the mask leaves out become the padding token, by which a model may tell where a text ends.
    """

    def __init__(self, model: nn.Module, passing: Passing, padding: int | None, task: Task) -> None:
        super().__init__()
        self.model, self.passing, self.padding = model, passing, padding
        self.task: Task = task

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        passing = self.passing
        if self.task == "language" and len(inputs) > len(passing.names):
            raise JobError(
                f"{type(self.model).__name__} is cut by the general rule and takes no positions, so the documents of a"
                " row would see each other: set data.pack = false, or put one document in each row"
            )
        named = dict(zip(passing.names, inputs, strict=False))
        if MASK in named and self.padding is not None:
            named[TOKENS] = named[TOKENS].masked_fill(named[MASK] == 0, self.padding)
        args, kwargs = block_arguments(self.model, named)
        where = tuple(named[name] for name in passing.travels if name in named)
        return with_where(argument_at(passing.place, args, kwargs), where)


class GenericBlock(nn.Module):
    """A block, with the arguments that the model gives to it."""

    def __init__(self, block: nn.Module, model: nn.Module, passing: Passing, given: GivenHidden) -> None:
        super().__init__()
        self.block, self.model, self.passing, self.given = block, model, passing, given

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        place, inputs = self.passing.place, self.passing.inputs(hidden, where)
        with self.given.for_now(hidden):
            args, kwargs = block_arguments(self.model, inputs)
        if isinstance(place, str):
            kwargs = {**kwargs, place: hidden}
        else:
            args = (*args[:place], hidden, *args[place + 1 :])
        returned = self.block(*args, **kwargs)
        return with_where(returned if self.passing.beside is None else returned[0], where)


class GenericHead(nn.Module):
    """All that comes after the blocks: the logits."""

    def __init__(self, model: nn.Module, passing: Passing, given: GivenHidden, task: Task) -> None:
        super().__init__()
        self.model, self.passing, self.given = model, passing, given
        self.task: Task = task

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        with self.given.for_now(hidden):
            return logits_of(self.task, self.model(**self.passing.inputs(hidden, where)))


def block_arguments(
    model: nn.Module, named: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of the block at which the pass of `model` stops.

    Raises:
        JobError: the pass goes around it.
    """
    try:
        model(**named)
    except BlockReached as reached:
        args, kwargs = reached.args
        return args, kwargs
    raise JobError(
        f"{type(model).__name__} has passed over a block: switch off what skips layers in training"
    )


def logits_of(task: Task, outputs: Any) -> Tensor:
    """The logits in what a model of transformers returns."""
    if task == "question-answering":
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits
