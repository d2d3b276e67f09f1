"""Gradients that siblings add up microbatch by microbatch: the order, what is absent, and how much may be under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from test_exchange import added_up, bits, drawn_gradients, on_threads, trained
from torch import Tensor, nn

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.shards import cut
from workers.gradients.reduce_scatter import MicrobatchReduceScatter
from workers.state.flat import Cut, FlatGradients, GradientBuffers, cuts_of
from workers.transport.channel import MessageStream

LAYERS = (0, 1, 2)
Layers = Mapping[int, dict[str, nn.Parameter]]


def given(layer: int, position: int) -> dict[str, Tensor]:
    """The gradients of one microbatch; of layer 2 the first three have none at all."""
    return {} if layer == 2 and position < 3 else drawn_gradients(10 * position + layer)


def buffers_of(layers: Layers) -> dict[int, GradientBuffers]:
    return {layer: GradientBuffers(parameters) for layer, parameters in layers.items()}


def cuts_for(summed: Mapping[int, GradientBuffers], siblings: int) -> dict[int, tuple[Cut, ...]]:
    if siblings == 1:
        return {}
    found: dict[int, tuple[Cut, ...]] = {}
    for layer, own in summed.items():
        sizes = [place.stop - place.begin for layout in own.layouts for place in layout.places]
        found[layer] = cuts_of(own.layouts, cut(sizes, layer, siblings))
    return found


def form(sink: MicrobatchReduceScatter, layers: Layers, positions: Sequence[int]) -> None:
    """Form gradients as a schedule does that splits backwards: of each microbatch every other parameter's with its
    input gradient, and the rest after the input gradient of the next one."""
    for number in range(len(positions) + 1):
        for now, whole in ((number, False), (number - 1, True)):
            if not 0 <= now < len(positions):
                continue
            for layer in reversed(LAYERS):
                sink.begin(layer, positions[now])
                for at, (name, gradient) in enumerate(sorted(given(layer, positions[now]).items())):
                    if at % 2 == whole:
                        layers[layer][name].grad = gradient
                sink.end(layer, positions[now], whole=whole)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("uneven", [False, True])
def test_each_owner_has_the_sum_in_order_of_what_it_owns(siblings: int, uneven: bool) -> None:
    """Twice, and the second time only the first pipelines have microbatches at the end."""
    executed_by = (0, *range(siblings), 0) if uneven and siblings > 1 else ()
    layers = [{layer: trained() for layer in LAYERS} | {3: {}} for _ in range(siblings)]
    found: list[dict[int, FlatGradients]] = [{} for _ in range(siblings)]

    def work(rank: int, channel: LocalChannel) -> None:
        summed = buffers_of(layers[rank])
        cuts = cuts_for(summed, siblings)
        sink = MicrobatchReduceScatter(
            channel,
            range(siblings),
            summed,
            0,
            cuts=cuts,
            rounds=(siblings,) if executed_by else (siblings, 1),
            order=(*reversed(LAYERS), 3),
            executed_by=executed_by,
        )
        for _ in range(2):
            sink.drop()
            sink.begin_window()
            if executed_by:
                form(sink, layers[rank], [n for n, executes in enumerate(executed_by) if executes == rank])
            else:
                form(sink, layers[rank], (rank, siblings + rank))
                if rank == 0:
                    sink.begin_window()
                    form(sink, layers[rank], (2 * siblings,))
            sink.reduce()
        for layer, own in summed.items():
            found[rank][layer] = own.gathered(cuts[layer][rank] if cuts else None)

    on_threads(siblings, work)
    positions = range(len(executed_by) or 2 * siblings + 1)
    for layer in LAYERS:
        owned = [name for of_rank in found for name in of_rank[layer]]
        assert len(owned) == len(set(owned))
        for name in trained():
            expected = added_up([given(layer, at)[name] for at in positions if name in given(layer, at)])
            assert (name in owned) == (expected is not None), (layer, name)
            for of_rank in found:
                if expected is not None and name in of_rank[layer]:
                    assert bits(of_rank[layer][name]) == bits(expected), (layer, name)
    if siblings > 1:
        kept = [sum(each.numel() for each in of_rank[0].buffers) for of_rank in found]
        assert max(kept) < 0.8 * sum(kept), "each has memory for its own shard alone"


@pytest.mark.parametrize("prefix", [0, 2, 3])
def test_siblings_say_nothing_of_layers_that_are_frozen_as_a_whole(
    prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [{layer: trained() for layer in LAYERS} for _ in range(2)]
    told: list[int] = []
    send = LocalChannel.send

    def heard(channel: LocalChannel, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        told.extend(tensor.numel() for tensor in tensors if tensor.dtype == torch.bool)
        send(channel, stream, tensors)

    monkeypatch.setattr(LocalChannel, "send", heard)

    def work(rank: int, channel: LocalChannel) -> None:
        summed = buffers_of(layers[rank])
        sink = MicrobatchReduceScatter(
            channel, range(2), summed, 0, cuts=cuts_for(summed, 2), rounds=(2,), order=tuple(reversed(LAYERS))
        )
        sink.begin_step(prefix)
        sink.begin_window()
        for layer in reversed(range(prefix, len(LAYERS))):
            sink.begin(layer, rank)
            sink.end(layer, rank, whole=True)
        sink.reduce()

    on_threads(2, work)
    assert told == ([(len(LAYERS) - prefix) * len(trained())] * 2 if prefix < len(LAYERS) else [])


def test_a_rank_is_ahead_of_a_slow_sibling_by_one_layer() -> None:
    """What it has sent waits for its sibling, and it forms no third layer's gradients meanwhile."""
    hub = Hub(2, timeout_s=30.0)
    layers = [{layer: trained() for layer in LAYERS} for _ in range(2)]
    reached: list[list[int]] = [[], []]
    gate = threading.Semaphore(0)

    def work(rank: int) -> None:
        summed = buffers_of(layers[rank])
        sink = MicrobatchReduceScatter(LocalChannel(hub, rank), (0, 1), summed, 0, cuts=cuts_for(summed, 2))
        for layer in LAYERS:
            if rank == 1:
                gate.acquire()
            reached[rank].append(layer)
            sink.begin(layer, rank)
            for name, gradient in given(layer, rank).items():
                layers[rank][layer][name].grad = gradient
            sink.end(layer, rank, whole=True)
        sink.reduce()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for done in range(3):
        expected = min(3, done + 2)
        while len(reached[0]) < expected:
            time.sleep(0.001)
        # It waits in the channel now, or is about to: nothing that the sibling did lets it go on.
        threads[0].join(0.05)
        assert reached[0] == list(LAYERS[:expected])
        assert threads[0].is_alive()
        gate.release()
    for thread in threads:
        thread.join(30.0)
    assert reached[0] == reached[1] == list(LAYERS)


def test_what_was_dropped_leaves_no_trace() -> None:
    layers = {layer: trained() for layer in LAYERS}
    summed = buffers_of(layers)
    sink = MicrobatchReduceScatter(LocalChannel(Hub(1), 0), (0,), summed, 0)
    form(sink, layers, [5, 6])
    sink.begin(0, 7)
    layers[0]["bias"].grad = torch.ones(7)
    sink.end(0, 7, whole=False)
    assert sink.so_far(0)
    sink.drop()
    assert all(p.grad is None for parameters in layers.values() for p in parameters.values())
    form(sink, layers, [0])
    sink.reduce()
    for layer in LAYERS:
        gradients = summed[layer].gathered()
        assert {name: bits(g) for name, g in gradients.items()} == {
            name: bits(g) for name, g in given(layer, 0).items()
        }
