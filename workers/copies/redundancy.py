"""Parcels that the owner of a layer sends to its standbys in each step before the commit: all that the layer's update
depends on. Knows no update and no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.arrivals import Arrivals
from planner.plan import Plan
from planner.shards import Piece
from workers.gradients.sink import GradientSink
from workers.layers.layer import Layer
from workers.process.pinned_memory import pinned, to_device
from workers.state.flat import NO_GRADIENTS, FlatGradients, GradientBuffers, aligned, side_by_side
from workers.state.layer_state import Gradients, LayerState
from workers.transport.channel import Channel, MessageStream


@dataclass(frozen=True)
class Parcel:
    """Data that a standby needs for one step of a layer, besides the commit's decision."""

    gradients: FlatGradients
    buffers: dict[str, Tensor]
    """Buffers after the step."""
    energies: Tensor
    """float64[trained parameters], the freezing statistic of that name; zeros in a step without freezing."""


@dataclass(frozen=True)
class _Item:
    """A run of bytes in a parcel."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    begin: int


class Packing:
    """The form of a layer's parcels: uint8[bytes], the flat gradients as they lie, then buffers and statistics. An
    absent gradient is zeros and marked in a mask. A layer that is frozen as a whole has a light one, of buffers and
    statistics alone: uint8[light_bytes].

    It follows from the layer's shapes: the same for every step, for the owner and for its standbys.
    """

    def __init__(self, state: LayerState) -> None:
        self._trained = tuple(state.updates)
        self._layouts = tuple(flat.layout for flat in state.flats)
        self._weights = tuple(flat.weights for flat in state.flats)
        tensors = (*self._weights, *state.buffers.values())
        self._device = tensors[0].device if tensors else torch.device("cpu")
        parts = [("gradients", str(number), weights) for number, weights in enumerate(self._weights)]
        # Always there: a request may switch freezing on between two steps.
        energies = ("energy", "", torch.zeros(len(self._trained), dtype=torch.float64))
        rest = [energies, *(("buffer", name, buffer) for name, buffer in state.buffers.items())]
        # Wide types first.
        rest.sort(key=lambda part: -part[2].dtype.itemsize)
        self._items, end = _placed([*parts, *rest])
        self._light_items, self.light_bytes = _placed(rest)
        self._mask = slice(end, end + len(self._trained))
        self.bytes = self._mask.stop
        """Size of a parcel."""

    def pack(self, gradients: Gradients, buffers: Mapping[str, Tensor], energies: Sequence[float]) -> Tensor:
        """Return one parcel, in a fresh allocation that shares nothing."""
        summed = side_by_side(self._layouts, gradients, self._weights)
        raw = torch.zeros(self.bytes, dtype=torch.uint8, device=self._device)
        for item, buffer in zip(self._items, summed.buffers, strict=False):
            raw[item.begin : item.begin + item.bytes] = buffer.view(torch.uint8)
        self._put_rest(raw, gradients, buffers, energies)
        return raw

    def pack_in_place(
        self, gradients: FlatGradients, buffers: Mapping[str, Tensor], energies: Sequence[float]
    ) -> Tensor:
        """Return one parcel: the memory of `gradients` itself, if there is room in it (`GradientBuffers.make_room`).
        What adds to these gradients changes it."""
        memory = self._memory_of(gradients)
        if memory is None:
            return self.pack(gradients, buffers, energies)
        self._put_rest(memory, gradients, buffers, energies)
        return memory

    def pack_light(self, buffers: Mapping[str, Tensor], energies: Sequence[float]) -> Tensor:
        """Return the parcel of a step in which the layer has no gradient at all."""
        raw = torch.zeros(self.light_bytes, dtype=torch.uint8, device=self._device)
        _put(raw, self._light_items, buffers, energies)
        return raw

    def _memory_of(self, gradients: FlatGradients) -> Tensor | None:
        """The bytes in which the flat gradients lie as in a parcel; None if they do not."""
        if not gradients.buffers:
            return None
        storage = gradients.buffers[0].untyped_storage()
        if storage.nbytes() != self.bytes:
            return None
        for item, buffer in zip(self._items, gradients.buffers, strict=False):
            begin = buffer.storage_offset() * buffer.element_size()
            place = (buffer.untyped_storage()._cdata, begin, buffer.nbytes)
            if place != (storage._cdata, item.begin, item.bytes):
                return None
        return torch.empty(0, dtype=torch.uint8, device=gradients.buffers[0].device).set_(storage)

    def _put_rest(
        self, raw: Tensor, present: Collection[str], buffers: Mapping[str, Tensor], energies: Sequence[float]
    ) -> None:
        """Put into a parcel what lies behind the gradients."""
        _put(raw, self._items[len(self._layouts) :], buffers, energies)
        mask = [name in present for name in self._trained]
        raw[self._mask] = torch.tensor(mask, dtype=torch.uint8, device=raw.device)

    def unpack(self, raw: Tensor) -> Parcel:
        """Return what `pack` put in, on the layer's device: there as views of `raw`, which nobody changes."""
        raw = to_device(raw, self._device, ours=True)
        light = raw.numel() == self.light_bytes < self.bytes
        values = {
            (item.kind, item.name): raw[item.begin : item.begin + item.bytes]
            .view(item.dtype)
            .reshape(item.shape)
            for item in (self._light_items if light else self._items)
        }
        there = [] if light else raw[self._mask].tolist()
        return Parcel(
            gradients=NO_GRADIENTS
            if light
            else FlatGradients.of(
                self._layouts,
                [value for (kind, _), value in values.items() if kind == "gradients"],
                {name for name, present in zip(self._trained, there, strict=True) if present},
            ),
            buffers={name: value for (kind, name), value in values.items() if kind == "buffer"},
            energies=values["energy", ""],
        )


def _placed(parts: Sequence[tuple[str, str, Tensor]]) -> tuple[list[_Item], int]:
    """Runs of bytes one after the other, and where they end."""
    items: list[_Item] = []
    end = 0
    for kind, name, t in parts:
        begin = aligned(end)
        end = begin + t.nbytes
        items.append(_Item(kind, name, tuple(t.shape), t.dtype, t.nbytes, begin))
    return items, end


def _put(
    raw: Tensor, items: Sequence[_Item], buffers: Mapping[str, Tensor], energies: Sequence[float]
) -> None:
    """Put buffers and statistics where `items` say; zeros for those that are not given."""
    values: dict[tuple[str, str], Tensor] = {("buffer", name): value for name, value in buffers.items()}
    if energies:
        values["energy", ""] = torch.tensor(energies, dtype=torch.float64, device=raw.device)
    for item in items:
        part = raw[item.begin : item.begin + item.bytes]
        value = values.get((item.kind, item.name))
        if value is None:
            part.zero_()
        else:
            part.copy_(value.detach().reshape(-1).view(torch.uint8))


@dataclass(frozen=True)
class _Left:
    """A parcel that has left, or from a GPU will as soon as it is on the host."""

    parcel: Tensor
    on_host: Tensor | None = None
    there: torch.cuda.Event | None = None
    """When it is there."""


class Shipping:
    """One rank's part in the redundancy of a generation: it sends parcels of the layers that it owns, and receives
    those of the layers, or shards, that it is a standby for.

    Parcels can leave while the window goes on where its gradients are the step's: see `ShippingSink`.

    Args:
        place: this rank's.
        layers: the layers that this rank owns.
        tags: first free tag on the channel, the same on all ranks; one tag per layer of the model is used.
        held: copies that receive nothing until their layer, or shard, moves there.
        on_host: whether its copies are in host memory, and parcels for them stay there.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        place: int,
        layers: Mapping[int, tuple[Layer, LayerState]],
        tags: int,
        held: Arrivals = (),
        *,
        on_host: bool = False,
    ) -> None:
        self._channel = channel
        self._on_host = on_host
        self._owned = layers
        self._late: list[tuple[Piece, MessageStream]] = []
        self._place = place
        self._outgoing: list[tuple[int, list[MessageStream]]] = []
        self._incoming: list[tuple[Piece, MessageStream]] = []
        for piece, targets in plan.copied:
            owner, layer = plan.owner_of(piece), piece.layer
            streams = [
                MessageStream(owner, target, tags + layer, f"standby of layer {piece}") for target in targets
            ]
            self._late += [(piece, stream) for stream in streams if (piece, stream.target) in held]
            streams = [stream for stream in streams if (piece, stream.target) not in held]
            if owner == place and streams:
                self._outgoing.append((layer, streams))
            self._incoming += [(piece, stream) for stream in streams if stream.target == place]
        self._left: dict[int, _Left] = {}
        """Parcels of the step at hand that have left, or are on their way to the host, by layer."""
        self._prefix = 0
        self._expected = False
        """Whether the receivers know what comes, and so receive it while they compute."""
        self._early = False
        self._aside: torch.cuda.Stream | None = None
        self._packings = {layer: Packing(layers[layer][1]) for layer, _ in self._outgoing}
        for layer, packing in self._packings.items() if plan.shards == 1 else ():
            layers[layer][0].summed.make_room(packing.bytes)

    def expect(self, *, early: bool, prefix: int = 0) -> None:
        """Prepare to receive the parcels of the step that begins.

        Args:
            early: whether its own may leave while the window goes on; in the first step they never do.
            prefix: layers, from the input up, that the step freezes as a whole; others than in the step before only
                where the channel was renewed.
        """
        self._prefix = prefix
        # In the first step, the end of the window would wait for receivers that wait for the end of theirs.
        self._left, self._early = {}, early and self._expected
        for _, stream in self._incoming:
            self._channel.expect(stream, 1)

    def send_ahead(self, layer: int) -> None:
        """Start sending the layer's parcel, which is final. From a GPU it is copied on a stream of its own, and
        `send_copied` sends it."""
        for index, streams in self._outgoing:
            if index != layer or not self._early:
                continue
            raw = self._packed(index, self._owned[index][1].buffers, ())
            if not raw.is_cuda:
                self._left[index] = _Left(raw)
                self._put(streams, raw)
                continue
            if self._aside is None:
                self._aside = torch.cuda.Stream(raw.device)
            self._aside.wait_stream(torch.cuda.current_stream(raw.device))
            with torch.cuda.stream(self._aside):
                on_host = pinned(raw.shape, raw.dtype).copy_(raw, non_blocking=True)
                there = torch.cuda.Event()
                there.record(self._aside)
            self._left[index] = _Left(raw, on_host, there)

    def send_copied(self) -> None:
        """Send the parcels that are copied from a GPU, each as soon as it is on the host; that computes meanwhile."""
        streams = dict(self._outgoing)
        for index, left in self._left.items():
            if left.on_host is not None and left.there is not None:
                left.there.synchronize()
                self._put(streams[index], left.on_host)

    def send(
        self, energies: Mapping[int, Sequence[float]], buffers: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, Tensor]:
        """Start sending the step's parcels that have not left, and return all of them by layer: until the gradients are
        added to again. Gradients and buffers are final.

        Args:
            energies: layer -> freezing statistics, where the job freezes.
            buffers: layer -> what the step leaves, where that is not what the layer has now.
        """
        for index, streams in self._outgoing:
            if index not in self._left:
                left_buffers = buffers.get(index, self._owned[index][1].buffers)
                raw = self._packed(index, left_buffers, energies.get(index, ()))
                self._left[index] = _Left(raw)
                self._put(streams, raw)
        self._expected = True
        return {index: left.parcel for index, left in sorted(self._left.items())}

    def _packed(self, index: int, buffers: Mapping[str, Tensor], energies: Sequence[float]) -> Tensor:
        gradients = self._owned[index][0].gradients()
        if index < self._prefix and not gradients:
            return self._packings[index].pack_light(buffers, energies)
        return self._packings[index].pack_in_place(gradients, buffers, energies)

    def _put(self, streams: Sequence[MessageStream], raw: Tensor) -> None:
        for stream in streams:
            self._channel.send(stream, (raw,))

    def flush_held(self, kept: Callable[[int], Sequence[Tensor]], steps: int) -> dict[Piece, list[Tensor]]:
        """Send the parcels held back here, and return those received from others: by layer or shard, in the order of
        steps.

        Args:
            kept: layer -> its parcels.
            steps: number of parcels per layer.
        """
        got: dict[Piece, list[Tensor]] = {}
        for piece, stream in self._late:
            if stream.source == self._place:
                for raw in kept(piece.layer):
                    self._channel.send(stream, (raw,))
            elif stream.target == self._place:
                got[piece] = [self._receive(stream) for _ in range(steps)]
        self._channel.flush()
        return got

    def receive(self) -> dict[Piece, Tensor]:
        """Return the packed parcels of this rank's copies; wait until all have arrived and its own are sent."""
        received = {piece: self._receive(stream) for piece, stream in self._incoming}
        self._channel.flush()
        return received

    def _receive(self, stream: MessageStream) -> Tensor:
        (parcel,) = self._channel.receive(stream, on_host=self._on_host)
        return parcel


class ShippingSink(GradientSink):
    """Sink of a rank whose gradients of a window are the step's: their parcels leave while the window goes on."""

    def __init__(self, layers: Mapping[int, GradientBuffers], shipping: Shipping) -> None:
        super().__init__(layers)
        self._shipping = shipping

    def finished(self, layer: int) -> None:
        self._shipping.send_ahead(layer)

    def launched(self) -> None:
        self._shipping.send_copied()
