"""The comparison that shows, before ranks start, that the layers of a model without a file of its own are the model.

Both have two blocks and drawn weights, in float32: logits and gradients must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.huggingface.architecture import Model, SourceLayer
from workers.models.huggingface.definition import architecture_of, definition_of
from workers.models.huggingface.generic import not_cut
from workers.models.huggingface.generic_layers import IMAGES, MASK, SEGMENTS, TOKENS, Passing, logits_of
from workers.models.huggingface.library import parsed
from workers.models.huggingface.stand_ins import argument_at
from workers.protocol.errors import JobError

BLOCKS = 2
_ROWS, _LENGTH = 2, 8


def compare_with_whole(model: Model) -> None:
    """Compare a model of transformers with its layers, both with two blocks.

    Raises:
        JobError: they part; says where, and by how much.
    """
    small = _with_two_blocks(model)
    layers = architecture_of(small).layers_of(small)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            whole = getattr(small.module, small.name)(small.config).eval()
            modules = [each.build().eval() for each in definition_of(small, _Values(whole)).layers]
            passing: Any = modules[0].passing
            for batch in _batches(small, passing):
                _compare_one(small, whole, layers, modules, batch, passing)
        except JobError:
            raise
        except Exception as error:  # the code of any model
            raise not_cut(model, f"with two blocks it ends in {type(error).__name__}: {error}") from error


class _Values:
    """The values of a whole model's tensors."""

    def __init__(self, whole: nn.Module) -> None:
        self._tensors = whole.state_dict()

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    @torch.no_grad()
    def fill(self, layer: SourceLayer, module: nn.Module) -> list[Tensor]:
        own = module.state_dict(keep_vars=True)
        for name, tensor in own.items():
            tensor.copy_(self._tensors[layer.source_key(name)])
        return [*own.values()]


def _with_two_blocks(model: Model) -> Model:
    """`model` with two blocks; of what its config lists by block, the first two are left."""
    config = model.config
    count = config.num_hidden_layers
    fields = {
        name: value[:BLOCKS] if isinstance(value, list) and len(value) == count > BLOCKS else value
        for name, value in config.to_dict().items()
    }
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields |= {key: min(count, BLOCKS), "use_cache": False}
    return Model(model.name, model.module, parsed(getattr(model.module, model.name), fields), model.task)


def _batches(model: Model, passing: Passing) -> Iterator[dict[str, Tensor]]:
    """Batches for a model, of texts without padding and with it."""
    if passing.image:
        yield {IMAGES: torch.randn(_ROWS, *passing.image)}
        return
    config = model.config
    length = min(_LENGTH, getattr(config, "max_position_embeddings", _LENGTH))
    tokens = torch.randint(config.vocab_size, (_ROWS, length))
    yield {TOKENS: tokens}
    mask = torch.ones(_ROWS, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    padding = getattr(config, "pad_token_id", None)
    padded = {TOKENS: tokens.masked_fill(mask == 0, 0 if padding is None else padding), MASK: mask}
    if SEGMENTS in passing.names:
        padded[SEGMENTS] = torch.randint(2, (_ROWS, length))
    yield padded


def _compare_one(
    model: Model,
    whole: nn.Module,
    layers: Sequence[SourceLayer],
    modules: Sequence[nn.Module],
    batch: Mapping[str, Tensor],
    passing: Passing,
) -> None:
    blocks = [whole.get_submodule(layer.source["block"]) for layer in layers[1:-1]]
    with _watched(blocks, passing) as expected:
        expected.append(logits_of(model.task, whole(**batch)))
    tensors: Any = tuple(batch.values())
    for layer, module, theirs in zip(layers, modules, expected, strict=True):
        returned = module(*tensors)
        tensors = returned if isinstance(returned, tuple) else (returned,)
        _check_equal(model, f"what layer {layer.name} returns", tensors[0], theirs, batch)
    weights = torch.randn_like(tensors[0])
    for logits in (expected[-1], tensors[0]):
        logits.backward(weights)
    _compare_gradients(model, whole, layers, modules, batch)


@contextmanager
def _watched(blocks: Sequence[nn.Module], passing: Passing) -> Iterator[list[Tensor]]:
    """The hidden states that the first block gets, and that each returns."""
    seen: list[Tensor] = []

    def first(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen.append(argument_at(passing.place, args, kwargs))

    def each(_: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        seen.append(returned if passing.beside is None else returned[0])

    hooks = [blocks[0].register_forward_pre_hook(first, with_kwargs=True)]
    hooks += [block.register_forward_hook(each) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _compare_gradients(
    model: Model,
    whole: nn.Module,
    layers: Sequence[SourceLayer],
    modules: Sequence[nn.Module],
    batch: Mapping[str, Tensor],
) -> None:
    """Compare, the last layer first, and drop the gradients. Those of uses of one parameter are one sum."""
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    ours: dict[int, Tensor] = {}
    named = [
        (layer, name, parameter, theirs[layer.source_key(name)])
        for layer, module in zip(layers, modules, strict=True)
        for name, parameter in module.named_parameters()
    ]
    for _, _, parameter, their in reversed(named):
        if parameter.grad is not None:
            ours[id(their)] = ours[id(their)] + parameter.grad if id(their) in ours else parameter.grad
    for layer, name, _, their in reversed(named):
        _check_equal(
            model, f"the gradient of {name} in layer {layer.name}", ours.get(id(their)), their.grad, batch
        )
    for _, _, parameter, their in named:
        parameter.grad = their.grad = None


def _check_equal(
    model: Model, what: str, ours: Tensor | None, theirs: Tensor | None, batch: Mapping[str, Tensor]
) -> None:
    """Raises:
    JobError: they are not equal.
    """
    if ours is None or theirs is None:
        if ours is theirs:
            return
        part = "is there in one of the two only"
    elif ours.shape != theirs.shape:
        part = f"is {list(ours.shape)}, and {list(theirs.shape)} in the whole model"
    elif torch.equal(ours, theirs):
        return
    else:
        part = f"differs by up to {float((ours - theirs).detach().abs().max()):.1e} from the whole model's"
    padded = ", in padded texts," if MASK in batch else ""
    raise not_cut(model, f"with two blocks{padded} {what} {part}")
