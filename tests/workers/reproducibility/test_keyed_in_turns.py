"""A build beside training draws what any other build draws, and training does not wait for all of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from long_operation import compute_long, drawing_meanwhile
from torch import Tensor, nn

from workers.reproducibility import rng
from workers.reproducibility.keyed_in_turns import LARGE_ELEMENTS, keyed_in_turns

LARGE = (LARGE_ELEMENTS // 256, 256)
KEY = 7


def draws() -> list[Tensor]:
    """Draws by operations with and without a generator, large and small, and after their own seed."""
    drawn = [torch.empty(LARGE).normal_(), torch.randn(LARGE), torch.rand(3), nn.Linear(*LARGE).weight]
    drawn.append(nn.functional.dropout(torch.ones(LARGE)))
    torch.manual_seed(3)
    drawn += [torch.empty(LARGE).uniform_(), torch.randperm(50), torch.bernoulli(torch.full(LARGE, 0.5))]
    drawn.append(torch.empty(LARGE).normal_(generator=torch.Generator().manual_seed(5)))
    return [*drawn, torch.rand(3)]


@pytest.fixture
def training() -> Iterator[list[Tensor]]:
    """The draws of another thread, which draws under one key again and again."""
    drawn: list[Tensor] = []
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            with rng.keyed(KEY + 1):
                drawn.append(torch.cat([torch.rand(5), nn.functional.dropout(torch.ones(5))]))

    thread = threading.Thread(target=train)
    thread.start()
    yield drawn
    over.set()
    thread.join()


def test_neither_thread_sees_that_the_other_draws(training: list[Tensor]) -> None:
    with rng.keyed(KEY):
        expected = draws()
    for _ in range(20):
        with keyed_in_turns(KEY):
            beside = draws()
        assert all(torch.equal(one, other) for one, other in zip(beside, expected, strict=True))
    with rng.keyed(KEY + 1):
        alone = torch.cat([torch.rand(5), nn.functional.dropout(torch.ones(5))])
    assert len(training) > 20
    assert all(torch.equal(drawn, alone) for drawn in training)


def test_another_thread_takes_its_turn_while_a_large_operation_runs() -> None:
    with drawing_meanwhile(), keyed_in_turns(KEY):
        compute_long(torch.zeros(LARGE))
