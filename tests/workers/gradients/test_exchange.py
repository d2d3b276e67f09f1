"""Sums over replicas and over the uses of a tied parameter: their order, and that each counts once."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from torch import Tensor, nn

from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from planner.shares import ReplicaPart
from workers.build import build_module
from workers.config import OptimizerConfig
from workers.data.registry import open_dataset
from workers.data.sampling import train_indices
from workers.gradients.exchange import ReplicaExchange, TiedUse, TieExchange
from workers.gradients.replica_sums import ReplicaSums
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport
from workers.reproducibility import rng
from workers.state.flat import FlatGradients, GradientBuffers
from workers.transport.channel import MessageStream

Expected = Callable[[int, str], Tensor | None]
"""(layer, name) -> gradient"""

PARTS = (1e8, 5.0, -6e7)
"""In float32 the sum in this order is 40000008; the other two orders of addition give 40000004."""


def on_threads(size: int, work: Callable[[int, LocalChannel], None]) -> None:
    hub = Hub(size, timeout_s=30.0)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank, LocalChannel(hub, rank))
        except BaseException as error:
            errors.append(error)
            hub.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def with_grad(value: float | None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = None if value is None else torch.full((5,), value)
    return parameter


SIZES = {"matrix": (3, 50), "bias": (7,), "gain": (), "none": (0, 2), "unused": (4,)}
"""Large enough for three siblings to sum a range each."""


def trained() -> dict[str, nn.Parameter]:
    doubles = {"double": nn.Parameter(torch.zeros(90, dtype=torch.float64))}
    return {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()} | doubles


def drawn_gradients(seed: int) -> dict[str, Tensor]:
    """Of some parameters, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, parameter in trained().items():
        if name == "unused" or torch.rand((), generator=generator) < 0.4:
            continue
        values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 1e4
        zeros = torch.rand(parameter.shape, generator=generator) < 0.3
        found[name] = torch.where(zeros, torch.where(values > 0, 0.0, -0.0).to(values.dtype), values)
    return found


def added_up(gradients: Sequence[Tensor]) -> Tensor | None:
    """One after the other; None if there are none."""
    total: Tensor | None = None
    for gradient in gradients:
        total = gradient.clone() if total is None else total + gradient
    return total


def summed_by_hand(
    replicas: Sequence[Sequence[Mapping[str, Tensor]]], name: str, parameter: Tensor
) -> Tensor | None:
    """The sum over replicas, each the sum of its parts: absent parts are left out, absent replicas count as zeros."""
    of_replicas = [added_up([part[name] for part in parts if name in part]) for parts in replicas]
    if all(total is None for total in of_replicas):
        return None
    return added_up([torch.zeros_like(parameter) if total is None else total for total in of_replicas])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).numpy().tobytes()


def assert_sums(layers: Sequence[Mapping[int, dict[str, nn.Parameter]]], expected: Expected) -> None:
    """Every sibling has the expected gradients, bit by bit."""
    for of_rank in layers:
        for layer, parameters in of_rank.items():
            for name, parameter in parameters.items():
                wanted = expected(layer, name)
                assert (parameter.grad is None) == (wanted is None), (layer, name)
                if parameter.grad is not None and wanted is not None:
                    assert bits(parameter.grad) == bits(wanted), (layer, name)


@pytest.mark.parametrize("siblings", [2, 3])
def test_replicas_are_summed_in_their_order_whatever_is_absent(siblings: int) -> None:
    layers = [{0: trained(), 1: {}, 2: trained()} for _ in range(siblings)]

    def work(rank: int, channel: LocalChannel) -> None:
        summed = {layer: GradientBuffers(parameters) for layer, parameters in layers[rank].items()}
        parts = [ReplicaPart(replica, 0, 1, replica) for replica in range(siblings)]
        exchange = ReplicaExchange(channel, range(siblings), summed, 0, parts)
        for step in range(3):
            for layer, parameters in layers[rank].items():
                for name, parameter in parameters.items():
                    gradients = {} if (layer, step) == (2, 1) else drawn_gradients(seed(step, rank, layer))
                    parameter.grad = gradients.get(name)
            (part,) = exchange.own_parts
            exchange.sum({part: {layer: of_layer.taken() for layer, of_layer in summed.items()}})
            for of_layer in summed.values():
                of_layer.gathered()
            if step < 2:
                for of_layer in summed.values():
                    of_layer.drop()

    def seed(step: int, rank: int, layer: int) -> int:
        return 100 * step + 10 * rank + layer

    def expected(layer: int, name: str) -> Tensor | None:
        replicas = [[drawn_gradients(seed(2, rank, layer))] for rank in range(siblings)]
        return summed_by_hand(replicas, name, trained()[name])

    on_threads(siblings, work)
    assert_sums(layers, expected)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_siblings_say_nothing_of_layers_that_are_frozen_as_a_whole(
    prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [{0: trained(), 1: trained()} for _ in range(2)]
    told: list[int] = []
    send = LocalChannel.send

    def heard(channel: LocalChannel, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        if tensors[0].dtype == torch.bool:
            told.append(tensors[0].numel())
        send(channel, stream, tensors)

    monkeypatch.setattr(LocalChannel, "send", heard)

    def work(rank: int, channel: LocalChannel) -> None:
        summed = {layer: GradientBuffers(parameters) for layer, parameters in layers[rank].items()}
        parts = [ReplicaPart(replica, 0, 1, replica) for replica in range(2)]
        exchange = ReplicaExchange(channel, range(2), summed, 0, parts)
        exchange.prefix = prefix
        for layer, parameters in layers[rank].items():
            for name, parameter in parameters.items():
                parameter.grad = drawn_gradients(10 * rank + layer).get(name) if layer >= prefix else None
        (part,) = exchange.own_parts
        exchange.sum({part: {layer: of_layer.taken() for layer, of_layer in summed.items()}})
        for of_layer in summed.values():
            of_layer.gathered()

    def expected(layer: int, name: str) -> Tensor | None:
        if layer < prefix:
            return None
        replicas = [[drawn_gradients(10 * rank + layer)] for rank in range(2)]
        return summed_by_hand(replicas, name, trained()[name])

    on_threads(2, work)
    assert_sums(layers, expected)
    assert told == [(2 - prefix) * len(trained())] * 2 if prefix < 2 else not told


def test_parts_of_a_replica_are_summed_before_the_replicas() -> None:
    """Of two replicas, the second pipeline executes the end of the first and all of the second."""
    parts = (ReplicaPart(0, 0, 2, 0), ReplicaPart(0, 2, 3, 1), ReplicaPart(1, 0, 3, 1))
    layers = [{0: trained(), 1: trained()} for _ in range(2)]

    def given(part: ReplicaPart, layer: int) -> dict[str, Tensor]:
        # Of layer 1 the first replica has no gradient at all.
        return {} if (layer, part.replica) == (1, 0) else drawn_gradients(7 * parts.index(part) + layer)

    def work(rank: int, channel: LocalChannel) -> None:
        summed = {layer: GradientBuffers(parameters) for layer, parameters in layers[rank].items()}
        exchange = ReplicaExchange(channel, (0, 1), summed, 0, parts)
        taken: dict[ReplicaPart, dict[int, FlatGradients]] = {}
        for part in parts:
            if part.pipeline == rank:
                for layer, parameters in layers[rank].items():
                    for name, gradient in given(part, layer).items():
                        parameters[name].grad = gradient
                    taken.setdefault(part, {})[layer] = summed[layer].taken()
        exchange.sum(taken)

    def expected(layer: int, name: str) -> Tensor | None:
        replicas = [[given(part, layer) for part in parts if part.replica == number] for number in range(2)]
        return summed_by_hand(replicas, name, trained()[name])

    on_threads(2, work)
    assert_sums(layers, expected)


@pytest.mark.parametrize(("siblings", "replicas"), [(1, 4), (2, 4), (2, 5), (3, 7)])
def test_replicas_summed_window_by_window_have_the_bits_of_all_at_once(siblings: int, replicas: int) -> None:
    """The last window may have fewer replicas than there are siblings; layers and parameters come and go."""
    layers = [{layer: trained() for layer in range(6)} for _ in range(siblings)]
    every = [ReplicaPart(replica, 0, 1, replica % siblings) for replica in range(replicas)]
    windows = [every[first : first + siblings] for first in range(0, replicas, siblings)]

    def given(replica: int, layer: int, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(97 * replica + 7 * layer + step)
        absent = torch.rand((), generator=generator) < 0.5 or layer == 5
        return {} if absent else drawn_gradients(1000 * step + 31 * replica + layer)

    def work(rank: int, channel: LocalChannel) -> None:
        summed = {layer: GradientBuffers(parameters) for layer, parameters in layers[rank].items()}
        exchange = ReplicaExchange(channel, range(siblings), summed, 0, every)
        for step in range(4):
            for number, parts in enumerate(windows):
                taken: dict[ReplicaPart, dict[int, FlatGradients]] = {}
                for part in parts:
                    if part.pipeline != rank:
                        continue
                    for layer, parameters in layers[rank].items():
                        for name, gradient in given(part.replica, layer, step).items():
                            parameters[name].grad = gradient
                        taken.setdefault(part, {})[layer] = summed[layer].taken()
                exchange.add(taken, parts, last=number == len(windows) - 1)
            for of_layer in summed.values():
                of_layer.gathered()
            if step < 3:
                for of_layer in summed.values():
                    of_layer.drop()

    def expected(layer: int, name: str) -> Tensor | None:
        of_replicas = [[given(replica, layer, 3)] for replica in range(replicas)]
        return summed_by_hand(of_replicas, name, trained()[name])

    on_threads(siblings, work)
    assert_sums(layers, expected)
    if siblings > 1:
        return
    alone = {layer: trained() for layer in range(6)}
    summed = {layer: GradientBuffers(parameters) for layer, parameters in alone.items()}
    sink = ReplicaSums(summed, 1)
    for step in range(4):
        sink.drop()
        for replica in range(replicas):
            for layer, parameters in alone.items():
                sink.begin(layer, replica)
                for name, gradient in given(replica, layer, step).items():
                    parameters[name].grad = gradient
        sink.reduce()
    assert_sums([alone], expected)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1, 0), (1, 0, 1)])
def test_uses_of_a_tied_parameter_are_summed_in_layer_order(ranks: tuple[int, ...]) -> None:
    uses = [TiedUse(layer, "w", rank) for layer, rank in enumerate(ranks)]
    size = max(ranks) + 1
    parameters = [
        {(u.layer, "w"): with_grad(PARTS[u.layer]) for u in uses if u.rank == r} for r in range(size)
    ]

    on_threads(size, lambda rank, channel: TieExchange(channel, [uses], parameters[rank], 0, 0).sum())

    for of_rank in parameters:
        for parameter in of_rank.values():
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [40000008.0] * 5


def test_a_tied_parameter_counts_once_in_the_norm(tmp_path: Path) -> None:
    config = small_config(tmp_path, "tied", steps=1, optimizer=OptimizerConfig(lr=0.01, clip_norm=None))
    definition = build_definition(config.model, None)
    dataset = open_dataset(config.data, config.model, str(tmp_path)).dataset
    modules = [build_module(definition, i, config.job.seed) for i in range(len(definition.layers))]
    (group,) = definition.ties
    first, *others = (modules[definition.names.index(ref.layer)].get_submodule("up") for ref in group)
    for other in others:
        other.weight = first.weight
    for microbatch in range(config.microbatches):
        indices = train_indices(
            config.job.seed,
            0,
            microbatch,
            config.microbatches,
            config.pipeline.microbatch_size,
            dataset.train_samples,
        )
        batch = dataset.train(indices)
        tensors = batch.inputs
        for module, name in zip(modules, definition.names, strict=True):
            with rng.keyed(rng.key(config.job.seed, "forward", 0, microbatch, name)):
                tensors = (module(*tensors),)
        definition.loss(*tensors, *batch.targets).backward()
    unique = {id(p): p for module in modules for p in module.parameters()}
    squares = sum(float(p.grad.double().square().sum()) for p in unique.values() if p.grad is not None)

    for ranks in (1, 2):
        run = run_threads(job(config, ranks=ranks))
        (report,) = [r for r in run.reports if isinstance(r, StepReport)]
        assert report.grad_norm == pytest.approx(math.sqrt(squares) / config.microbatches, rel=1e-6)
