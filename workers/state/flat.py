"""A layer's trained parameters side by side: one buffer each for weights, gradients and every slot of the optimizer.

The parameters become views of the buffer, so that an update, a copy or a message is one operation for the whole layer.
Knows no update rule and no network. More versions of a layer's weights would be more buffers here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from workers.protocol.errors import JobError

ALIGNED = 32
"""Elements. In 16 bits and more a parameter is so aligned as a fresh allocation is: kernels choose their path, and so
the last bits, by alignment."""


ALIGNED_BYTES = 64
"""Where memory holds several buffers, each begins at a multiple of this, as a fresh allocation does."""


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    begin: int
    """Its first element."""
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a flat buffer: matrices first, then vectors and scalars, which do not decay."""

    places: tuple[ParameterPlace, ...]
    """In the order of the buffer."""
    size: int
    """Elements, with those between parameters, which are always 0."""

    @staticmethod
    def of(parameters: Mapping[str, Tensor]) -> Layout:
        """The layout of parameters of one dtype."""
        places: list[ParameterPlace] = []
        end = 0
        for name, tensor in sorted(parameters.items(), key=lambda item: item[1].dim() < 2):
            begin = -(-end // ALIGNED) * ALIGNED
            end = begin + tensor.numel()
            places.append(ParameterPlace(name, tuple(tensor.shape), begin, end))
        return Layout(tuple(places), end)

    def part(self, elements: slice) -> Layout:
        """Layout of the range `elements`: of each parameter the part that lies there, in one row."""
        within: list[ParameterPlace] = []
        for each in self.places:
            begin, stop = max(each.begin, elements.start), min(each.stop, elements.stop)
            if begin < stop:
                row = (1,) * (len(each.shape) - 1) + (stop - begin,)
                within.append(ParameterPlace(each.name, row, begin - elements.start, stop - elements.start))
        return Layout(tuple(within), elements.stop - elements.start)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Name -> the parameter's part of `buffer`, in its shape."""
        return {each.name: buffer[each.begin : each.stop].view(each.shape) for each in self.places}


@dataclass(frozen=True)
class Cut:
    """One shard of a layer: whole parameters, neighbours in the layer's flat buffers."""

    ranges: tuple[slice, ...]
    """By buffer, its elements; may be empty."""
    layouts: tuple[Layout, ...]
    """By buffer, how the parameters lie in that range."""

    @cached_property
    def parts(self) -> tuple[tuple[int, slice], ...]:
        """(buffer, elements), where there are any."""
        return tuple((n, each) for n, each in enumerate(self.ranges) if each.start < each.stop)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Its parameters, in the order of the buffers."""
        return tuple(place.name for layout in self.layouts for place in layout.places)


def cuts_of(layouts: Sequence[Layout], runs: Iterable[tuple[int, int]]) -> tuple[Cut, ...]:
    """A layer's shards, by number.

    Args:
        layouts: of the layer's flat buffers.
        runs: per shard its parameters as [first, stop), numbered through all buffers (`planner.shards.cut`).
    """
    found: list[Cut] = []
    for first, stop in runs:
        ranges: list[slice] = []
        parts: list[Layout] = []
        before = 0
        for layout in layouts:
            own = layout.places[max(0, first - before) : max(0, stop - before)]
            before += len(layout.places)
            begin, end = (own[0].begin, own[-1].stop) if own else (0, 0)
            ranges.append(slice(begin, end))
            moved = (replace(each, begin=each.begin - begin, stop=each.stop - begin) for each in own)
            parts.append(Layout(tuple(moved), end - begin))
        found.append(Cut(tuple(ranges), tuple(parts)))
    return tuple(found)


@dataclass(frozen=True)
class Flat:
    """The parameters of one layer that its module holds in one dtype."""

    layout: Layout
    weights: Tensor
    """[size], what training changes."""
    slots: dict[str, Tensor]
    """Slot of the optimizer -> [size]"""
    cast: Tensor | None = None
    """[size], the weights in 16 bits, with which the module computes; None: it computes with `weights`."""

    @staticmethod
    def of(parameters: Mapping[str, nn.Parameter], slots: Iterable[str], dtype: torch.dtype) -> Flat:
        """Have `parameters`, of one dtype, lie side by side, if they do not yet; with slots of zeros.

        Args:
            dtype: in which the module is to hold them.
        """
        layout = Layout.of(parameters)
        weights = _side_by_side(parameters, layout)
        flat = Flat(layout, weights, {slot: torch.zeros_like(weights) for slot in slots})
        return flat if weights.dtype == dtype else flat._cast_to(parameters, dtype)

    def _cast_to(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> Flat:
        cast = self.weights.to(dtype)
        for name, view in self.layout.views(cast).items():
            parameters[name].data = view
            parameters[name].grad_dtype = self.weights.dtype
        return replace(self, cast=cast)

    def part(self, elements: slice, layout: Layout, slots: Iterable[str]) -> Flat:
        """The range `elements`, in its `layout`, with slots of zeros. Only what the module computes with shares memory
        with the whole: weights beside casts are copied."""
        weights, cast = self.weights[elements], self.cast
        if cast is not None:
            weights, cast = weights.clone(), cast[elements]
        return Flat(layout, weights, {slot: torch.zeros_like(weights) for slot in slots}, cast)

    def recast(self) -> None:
        """The weights have changed."""
        if self.cast is not None:
            self.cast.copy_(self.weights)


def flats_of(
    parameters: Mapping[str, nn.Parameter], slots: Iterable[str], casts: Mapping[str, torch.dtype]
) -> tuple[Flat, ...]:
    """`Flat.of` for each dtype in which the module holds parameters.

    Args:
        casts: that of parameters which it holds in another dtype than they have now.
    """
    names = tuple(slots)
    groups: dict[tuple[torch.dtype, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        held = casts.get(name, parameter.dtype)
        groups.setdefault((held, parameter.dtype), {})[name] = parameter
    return tuple(Flat.of(own, names, held) for (held, _), own in groups.items())


@torch.no_grad()
def _side_by_side(parameters: Mapping[str, nn.Parameter], layout: Layout) -> Tensor:
    first = parameters[layout.places[0].name]
    storage = first.untyped_storage()
    if all(_lies_at(parameters[each.name], storage, each) for each in layout.places):
        return first.detach().as_strided((layout.size,), (1,), 0)
    buffer = torch.empty(layout.size, dtype=first.dtype, device=first.device)
    for each, following in pairwise(layout.places):
        buffer[each.stop : following.begin].zero_()
    for name, view in layout.views(buffer).items():
        view.copy_(parameters[name])
        parameters[name].data = view
    return buffer


def _lies_at(parameter: Tensor, storage: torch.UntypedStorage, place: ParameterPlace) -> bool:
    return (
        parameter.untyped_storage()._cdata == storage._cdata
        and parameter.storage_offset() == place.begin
        and parameter.is_contiguous()
        and storage.nbytes() >= place.stop * parameter.element_size()
    )


def aligned(size: int) -> int:
    """The first place for another buffer in memory of which `size` bytes are taken."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Dtype in which the gradients of `parameter` are summed."""
    return parameter.grad_dtype or parameter.dtype


class FlatGradients(Mapping[str, Tensor]):
    """A layer's gradients side by side, in the layouts of its weights. As a mapping: parameter -> its summed gradient;
    an absent one was frozen or not used, and its part of the buffer is 0.

    Args:
        buffers: one for each layout.
        views: of the buffers, by parameter that has a gradient.
    """

    def __init__(self, buffers: Sequence[Tensor], views: Mapping[str, Tensor]) -> None:
        self.buffers = tuple(buffers)
        self._views = views

    @staticmethod
    def of(layouts: Sequence[Layout], buffers: Sequence[Tensor], present: Collection[str]) -> FlatGradients:
        """Gradients of the parameters `present`."""
        views = {
            name: view
            for layout, buffer in zip(layouts, buffers, strict=True)
            for name, view in layout.views(buffer).items()
            if name in present
        }
        return FlatGradients(buffers, views)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


NO_GRADIENTS = FlatGradients((), {})
"""Gradients of a layer in which none is present; they take no memory."""


def side_by_side(
    layouts: Sequence[Layout], gradients: Mapping[str, Tensor], like: Sequence[Tensor]
) -> FlatGradients:
    """`gradients` in flat buffers: as they are if they lie so, else copies of them.

    Args:
        like: tensors of the dtypes and on the devices of the buffers.
    """
    if isinstance(gradients, FlatGradients):
        return gradients
    buffers = [
        torch.zeros(layout.size, dtype=one.dtype, device=one.device)
        for layout, one in zip(layouts, like, strict=True)
    ]
    found = FlatGradients.of(layouts, buffers, gradients.keys())
    for name, view in found.items():
        view.copy_(gradients[name])
    return found


@dataclass(frozen=True)
class SetAside:
    """The gradients of a microbatch of which more is to come."""

    buffers: tuple[Tensor, ...]
    views: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """By parameter, wherever they lie."""


class GradientBuffers:
    """Where the gradients of one layer are summed, side by side. Takes memory with the first of them.

    Args:
        parameters: those that the layer trains.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype], dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            groups.setdefault((parameter.dtype, grad_dtype(parameter)), {})[name] = parameter
        self.layouts = tuple(Layout.of(own) for own in groups.values())
        self._dtypes = tuple(summed for _, summed in groups)
        self._device = next((parameter.device for parameter in parameters.values()), None)
        self._least_bytes = 0
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buffers: tuple[Tensor, ...] = ()
        self._views: Mapping[str, Tensor] = {}
        self._part: FlatGradients | None = None
        """Where those of one shard are, of which alone there is memory."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def make_room(self, size: int) -> None:
        """Have the buffers lie in memory of at least `size` bytes from now on, one after the other from its start: what
        is sent along with them lies behind them, and nothing is copied for it."""
        if size != self._least_bytes:
            self._least_bytes = size
            self._buffers, self._views = (), {}

    def home(self, parameter: Tensor) -> Tensor:
        """Where the gradient of `parameter` belongs now, with undefined content.

        Raises:
            JobError: nothing trains it.
        """
        if id(parameter) not in self._names:
            raise JobError(
                f"a parameter {list(parameter.shape)} that was fixed when its layer was built has a gradient now: build"
                " it with requires_grad = True, and switch it off where it is not to be trained"
            )
        return self._homes()[self._names[id(parameter)]]

    @torch.no_grad()
    def gathered(self, shard: Cut | None = None) -> FlatGradients:
        """The gradients in the parameters' `.grad`: those that lie elsewhere are brought to where they belong.

        Args:
            shard: to return those of its parameters alone; None: all.
        """
        names = self.names if shard is None else shard.names
        if all(self._parameters[name].grad is None for name in names):
            return NO_GRADIENTS
        homes = self._homes() if self._part is None else self._part
        present: dict[str, Tensor] = {}
        for name in names:
            view, gradient = homes[name], self._parameters[name].grad
            if gradient is None:
                view.zero_()
                continue
            if gradient is not view:
                view.copy_(gradient)
                self._parameters[name].grad = view
            present[name] = view
        if self._part is not None:
            return FlatGradients(self._part.buffers, present)
        if shard is None:
            return FlatGradients(self._buffers, present)
        ranges = zip(self._buffers, shard.ranges, strict=True)
        return FlatGradients([buffer[elements] for buffer, elements in ranges], present)

    def taken(self) -> FlatGradients:
        """Take away and return the gradients: the parameters have none afterwards, and sum further ones elsewhere."""
        found = self.gathered()
        if found.buffers:
            self.drop()
            self._buffers, self._views = (), {}
        return found

    def put(self, summed: FlatGradients) -> None:
        """Have the parameters have these gradients; further ones are added to them, in their memory."""
        if not summed.buffers:
            self.drop()
            return
        self._buffers, self._views = summed.buffers, self._views_of(summed.buffers)
        for name, parameter in self._parameters.items():
            parameter.grad = self._views[name] if name in summed else None

    def put_part(self, shard: Cut, summed: Sequence[Tensor], present: Collection[str]) -> None:
        """Have the parameters of one shard have these gradients, and the others none.

        Args:
            summed: one for each of the shard's parts (`Cut.parts`), in memory that becomes theirs.
            present: the names of those that have a gradient.
        """
        self.drop()
        self._buffers, self._views = (), {}
        given = iter(summed)
        buffers = [
            next(given)
            if elements.start < elements.stop
            else torch.empty(0, dtype=dtype, device=self._device)
            for elements, dtype in zip(shard.ranges, self._dtypes, strict=True)
        ]
        self._part = FlatGradients.of(shard.layouts, buffers, shard.names)
        for name, view in self._part.items():
            self._parameters[name].grad = view if name in present else None

    def set_aside(self) -> SetAside:
        """Take away and return the gradients of a microbatch of which more is to come."""
        gradients = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        found = SetAside(self._buffers, self._views, gradients)
        self.drop()
        self._buffers, self._views = (), {}
        return found

    def take_back(self, aside: SetAside) -> None:
        """Go on with what was set aside."""
        self._buffers, self._views = aside.buffers, aside.views
        for name, parameter in self._parameters.items():
            parameter.grad = aside.gradients.get(name)

    def drop(self) -> None:
        self._part = None
        for parameter in self._parameters.values():
            parameter.grad = None

    def free(self) -> None:
        """Drop the gradients and the memory for them."""
        self.drop()
        self._buffers, self._views = (), {}

    def zeros(self) -> FlatGradients:
        """Fresh memory in which no gradient is present."""
        ranges: list[tuple[int, int]] = []
        end = 0
        for layout, dtype in zip(self.layouts, self._dtypes, strict=True):
            begin = aligned(end)
            end = begin + layout.size * dtype.itemsize
            ranges.append((begin, end))
        memory = torch.zeros(max(end, self._least_bytes), dtype=torch.uint8, device=self._device)
        parts = zip(ranges, self._dtypes, strict=True)
        return FlatGradients([memory[begin:stop].view(dtype) for (begin, stop), dtype in parts], {})

    def _homes(self) -> Mapping[str, Tensor]:
        if not self._buffers:
            self._buffers = self.zeros().buffers
            self._views = self._views_of(self._buffers)
        return self._views

    def _views_of(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.layouts, buffers, strict=True)
        return {name: view for layout, buffer in pairs for name, view in layout.views(buffer).items()}
