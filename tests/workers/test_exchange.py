"""Sums over replicas and over the uses of a tied parameter: their order, and that each counts once."""

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from torch import nn

from workers.build import build_module
from workers.config import OptimizerConfig
from workers.data.registry import open_dataset
from workers.data.sampling import train_indices
from workers.exchange import ReplicaExchange, TiedUse, TieExchange
from workers.launch.ranks import run_threads
from workers.models.registry import build_definition
from workers.protocol import StepReport
from workers.reproducibility import rng
from workers.transport.local import Hub, LocalChannel

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


@pytest.mark.parametrize("absent", [None, 0, 1, 2])
def test_replicas_are_summed_in_their_order(absent: int | None) -> None:
    parts = [None if i == absent else part for i, part in enumerate(PARTS)]
    total = torch.zeros(())
    for part in parts:
        total = total + torch.tensor(part or 0.0)
    # There are two parameters, so that different siblings form the sums.
    parameters = [{(0, "a"): with_grad(p), (0, "b"): with_grad(p), (0, "c"): with_grad(None)} for p in parts]

    on_threads(3, lambda rank, channel: ReplicaExchange(channel, (0, 1, 2), parameters[rank], 0).sum())

    for of_rank in parameters:
        for name in ("a", "b"):
            grad = of_rank[0, name].grad
            assert grad is not None
            assert grad.tolist() == [float(total)] * 5
        assert of_rank[0, "c"].grad is None


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
    modules = [build_module(definition, i, config.seed) for i in range(len(definition.layers))]
    (group,) = definition.ties
    first, *others = (modules[definition.names.index(ref.layer)].get_submodule("up") for ref in group)
    for other in others:
        other.weight = first.weight
    for microbatch in range(config.microbatches):
        indices = train_indices(
            config.seed, 0, microbatch, config.microbatches, config.microbatch_size, dataset.train_samples
        )
        batch = dataset.train(indices)
        tensors = batch.inputs
        for module, name in zip(modules, definition.names, strict=True):
            with rng.keyed(rng.key(config.seed, "forward", 0, microbatch, name)):
                tensors = (module(*tensors),)
        definition.loss(*tensors, *batch.targets).backward()
    unique = {id(p): p for module in modules for p in module.parameters()}
    squares = sum(float(p.grad.double().square().sum()) for p in unique.values() if p.grad is not None)

    for ranks in (1, 2):
        run = run_threads(job(config, ranks=ranks))
        (report,) = [r for r in run.reports if isinstance(r, StepReport)]
        assert report.grad_norm == pytest.approx(math.sqrt(squares) / config.microbatches, rel=1e-6)
