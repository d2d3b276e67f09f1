"""Models without a file in `architectures/`: cut at their one list of blocks.

What passes between the blocks is seen in a pass that computes shapes alone. `comparison.py` shows, before ranks start,
that the layers are the model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from workers.models.huggingface.architecture import Architecture, Model, SourceLayer, Task, Ties, numbered
from workers.models.huggingface.generic_layers import (
    IMAGES,
    MASK,
    SEGMENTS,
    TOKENS,
    GenericBlock,
    GenericEmbedding,
    GenericHead,
    Passing,
    logits_of,
)
from workers.models.huggingface.library import sketched
from workers.models.huggingface.stand_ins import GivenHidden, PassThrough, StandIn, StopAtBlock, argument_at
from workers.protocol.errors import JobError
from workers.state.layer_state import ParameterRef

CLASS_ENDS: Mapping[str, Task] = {
    "ForCausalLM": "language",
    "LMHeadModel": "language",
    "ForMaskedLM": "masked-language",
    "ForSequenceClassification": "sequence-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
"""End of a class's name -> what it is for."""
_INPUTS: Mapping[Task, tuple[str, ...]] = {"language": (TOKENS, MASK), "image-classification": (IMAGES,)}
_TEXT = (TOKENS, MASK, SEGMENTS)
_ROWS, _LENGTH = 2, 8
"""Size of the texts of the first pass."""


def task_of(name: str) -> Task | None:
    """Task of a class, by its name; None: none that is known here."""
    return next((task for end, task in CLASS_ENDS.items() if name.endswith(end)), None)


def not_cut(model: Model, why: str) -> JobError:
    """The error for a model that the rule does not fit."""
    return JobError(
        f"{model.name} has no file of its own here, and it cannot be cut at its blocks: {why}. Write a file for it"
        " (docs/guides/hugging-face.md), or a factory that returns its layers (model.factory)"
    )


def generic_architecture(model: Model) -> Architecture:
    """The way to cut a model that no file knows.

    Raises:
        JobError: it cannot be cut; says why.
    """
    cut = _Cut(model)
    return Architecture({}, lambda _: cut.layers, lambda _: cut.ties)


@dataclass(frozen=True)
class _Call:
    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: Any


class _Cut:
    """A model on the meta device, and its layers.

    Raises (as all that it offers):
        JobError: it cannot be cut.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._config = copy.deepcopy(model.config)
        self._config.use_cache = False
        if drops := [key for key, value in self._config.to_dict().items() if "layerdrop" in key and value]:
            raise not_cut(model, f"it skips layers at random ({drops[0]} of its config.json)")
        of = getattr(model.module, model.name)
        self._whole = sketched(of, self._config)
        takes = inspect.signature(of.forward).parameters
        segments = getattr(self._config, "type_vocab_size", 0) > 1
        self._names = tuple(
            name
            for name in _INPUTS.get(model.task, _TEXT)
            if name in takes and (name != SEGMENTS or segments)
        )
        self._image = self._image_size() if IMAGES in self._names else ()
        self._list = self._list_of_blocks()
        self._blocks = self._modules(self._list)
        self._others = self._beside_the_blocks()

    def _image_size(self) -> tuple[int, ...]:
        size, channels = (getattr(self._config, key, None) for key in ("image_size", "num_channels"))
        if size is None or channels is None:
            raise not_cut(self._model, "its config.json has no image_size and num_channels")
        return (channels, size, size) if isinstance(size, int) else (channels, *size)

    def _modules(self, path: str) -> list[nn.Module]:
        """The modules in the list at `path`."""
        return [*self._whole.get_submodule(path).children()]

    def _list_of_blocks(self) -> str:
        """The path of the one list of blocks."""
        count = getattr(self._config, "num_hidden_layers", None)
        lists = [path for path, part in self._whole.named_modules() if isinstance(part, nn.ModuleList)]
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        fitting = [path for path in outer if len(self._modules(path)) == count]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise not_cut(self._model, f"it has several lists of blocks, {' and '.join(fitting)}")
        lengths = ", ".join(f"{path} of {len(self._modules(path))}" for path in outer) or "none"
        raise not_cut(
            self._model,
            f"no list of modules has as many as num_hidden_layers = {count} (its lists: {lengths})",
        )

    def _beside_the_blocks(self) -> dict[str, nn.Module]:
        """Path -> module of what lies beside the list of blocks, or beside a module that holds it."""
        parts = self._list.split(".")
        holders = {".".join(parts[:depth]) for depth in range(len(parts))}
        for holder in sorted(holders):
            held = self._whole.get_submodule(holder)
            own = [*held._parameters, *(held._buffers.keys() - held._non_persistent_buffers_set)]
            if own:
                raise not_cut(self._model, f"{holder}.{own[0]} belongs to no module".replace(" .", " "))
        return {
            path: part
            for path, part in self._whole.named_modules()
            if path and path.rpartition(".")[0] in holders and path not in {*holders, self._list}
        }

    def _usual(self) -> dict[str, Tensor]:
        """A batch for a pass of shapes."""
        if self._image:
            return {IMAGES: torch.zeros(_ROWS, *self._image)}
        batch = {name: torch.ones(_ROWS, _LENGTH, dtype=torch.long) for name in self._names}
        return {name: tensor - 1 if name == SEGMENTS else tensor for name, tensor in batch.items()}

    def _calls(self, batch: Mapping[str, Tensor]) -> tuple[list[_Call], Tensor]:
        """The calls of modules in a pass that computes shapes alone, and its logits."""
        given, calls = GivenHidden(), list[_Call]()

        def watched(path: str, part: nn.Module) -> nn.Module:
            def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any) -> None:
                calls.append(_Call(path, args, kwargs, returned))

            stand_in = StandIn(part, given)
            stand_in.register_forward_hook(note, with_kwargs=True)
            return stand_in

        entries = [watched(f"{self._list}.{n}", block) for n, block in enumerate(self._blocks)]
        model = self._copy(entries, {path: watched(path, part) for path, part in self._others.items()})
        return calls, logits_of(self._model.task, model(**batch))

    @cached_property
    def _first_calls(self) -> list[_Call]:
        try:
            calls, _ = self._calls(self._usual())
        except Exception as error:  # the code of any model
            raise not_cut(self._model, f"a pass of shapes ends in {type(error).__name__}: {error}") from error
        return calls

    def _of_blocks(self, calls: Iterable[_Call]) -> list[_Call]:
        return [call for call in calls if call.path.startswith(f"{self._list}.")]

    @cached_property
    def _passing(self) -> Passing:
        blocks = self._of_blocks(self._first_calls)
        if [call.path for call in blocks] != [f"{self._list}.{n}" for n in range(len(self._blocks))]:
            raise not_cut(self._model, "it does not call each of its blocks once, in their order")
        returned = blocks[0].returned
        beside = None if isinstance(returned, Tensor) else tuple(returned[1:])
        if any(isinstance(each, Tensor) for each in tree_iter(beside)):
            raise not_cut(self._model, f"{blocks[0].path} returns more than hidden states")
        places = {*range(len(blocks[0].args)), *blocks[0].kwargs}
        for before, call in pairwise(blocks):
            hidden = before.returned if beside is None else before.returned[0]
            places = {place for place in places if argument_at(place, call.args, call.kwargs) is hidden}
            if not places:
                raise not_cut(
                    self._model,
                    f"{call.path} does not get what {before.path} returns: more is computed between them",
                )
        travels = tuple(
            name for name in self._names if name == MASK or (name in (TOKENS, SEGMENTS) and self._reads(name))
        )
        return Passing(self._names, travels, min(places, key=str), beside, self._image)

    def _reads(self, name: str) -> bool:
        """Whether blocks or logits depend on an input otherwise than through modules with parameters."""
        batch = self._usual()
        try:
            calls, logits = self._calls({**batch, name: batch[name].to("meta")})
        except Exception:  # it has no values: whoever reads them raises
            return True
        seen = [(call.args, call.kwargs) for call in self._of_blocks(calls)]
        return any(isinstance(each, Tensor) and each.is_meta for each in tree_iter((seen, logits)))

    @cached_property
    def _before(self) -> frozenset[str]:
        """The modules beside the blocks that are called before them."""
        paths = [call.path for call in self._first_calls]
        first = paths.index(f"{self._list}.0")
        before = frozenset(paths[:first])
        for path in sorted(before & {*paths[first:]}):
            if _has_state(self._others[path]):
                raise not_cut(self._model, f"{path} is called before the blocks and after them")
        return before

    @property
    def _after(self) -> Set[str]:
        return self._others.keys() - self._before

    def _copy(self, entries: Iterable[nn.Module], others: Mapping[str, nn.Module]) -> nn.Module:
        """The model with `entries` in place of its blocks, and `others` in place of modules, by path."""
        memo: dict[int, Any] = {id(self._config): self._config}
        memo[id(self._whole.get_submodule(self._list))] = nn.ModuleList(entries)
        memo |= {id(self._others[path]): part for path, part in others.items()}
        return copy.deepcopy(self._whole, memo)

    def _part(
        self, number: int, end: Callable[[nn.Module], nn.Module], kept: Set[str], given: GivenHidden
    ) -> Any:
        """The model with what is not in this layer replaced.

        Args:
            end: makes what takes the place of block `number`; passes go through all others.
            kept: the modules beside the blocks that belong to the layer.
        """
        passing = self._passing
        entries = [
            end(block) if n == number else PassThrough(block, passing.place, passing.beside)
            for n, block in enumerate(self._blocks)
        ]
        others: dict[str, nn.Module] = {}
        for path, part in self._others.items():
            if path not in kept and _has_state(part):
                others[path] = StandIn(part, given)
            elif path not in kept and isinstance(part, nn.Dropout):
                others[path] = nn.Identity()
        return self._copy(entries, others)

    def _embedding(self) -> nn.Module:
        padding = getattr(self._config, "pad_token_id", None)
        part = self._part(0, StopAtBlock, self._before, GivenHidden())
        return GenericEmbedding(part, self._passing, padding, self._model.task)

    def _block(self, number: int) -> nn.Module:
        given = GivenHidden()
        block = copy.deepcopy(self._blocks[number], {id(self._config): self._config})
        return GenericBlock(block, self._part(number, StopAtBlock, frozenset(), given), self._passing, given)

    def _head(self) -> nn.Module:
        given, passing = GivenHidden(), self._passing
        end = partial(PassThrough, place=passing.place, beside=passing.beside, given=given)
        part = self._part(len(self._blocks) - 1, end, self._after, given)
        return GenericHead(part, passing, given, self._model.task)

    @property
    def layers(self) -> tuple[SourceLayer, ...]:
        """The embedding, a layer for each block, the head."""
        _ = self._passing  # refused here, not where a layer is made
        before, after = ({f"model.{path}": path for path in paths} for paths in (self._before, self._after))
        return (
            SourceLayer("embed", self._embedding, before),
            *numbered(len(self._blocks), self._block, lambda n: {"block": f"{self._list}.{n}"}),
            SourceLayer("head", self._head, after),
        )

    @property
    def ties(self) -> Ties:
        """Groups of parameters that are one in the model and lie in several layers."""
        held = [
            *(
                ("embed", f"model.{path}", part)
                for path, part in self._others.items()
                if path in self._before
            ),
            *((f"block{n}", "block", block) for n, block in enumerate(self._blocks)),
            *(("head", f"model.{path}", part) for path, part in self._others.items() if path in self._after),
        ]
        uses: dict[int, dict[str, ParameterRef]] = {}
        for layer, path, part in held:
            for name, parameter in part.named_parameters():
                uses.setdefault(id(parameter), {}).setdefault(layer, ParameterRef(layer, f"{path}.{name}"))
        return tuple(tuple(found.values()) for found in uses.values() if len(found) > 1)


def _has_state(part: nn.Module) -> bool:
    return bool(part.state_dict())
