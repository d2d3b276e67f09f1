"""How the uses of one parameter are summed where each adds itself in 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.layers.deferred.queue import Accumulator, ParameterUse, Workspace, new_home


def use(accumulator: Accumulator, amount: float) -> ParameterUse:
    def form(out: Tensor | None) -> Tensor:
        raise AssertionError("it adds itself")

    def add(total: Tensor) -> None:
        total.add_(amount)

    return ParameterUse(accumulator, form, torch.bfloat16, add)


def test_two_uses_in_one_microbatch_are_summed_before_they_are_added_as_autograd_does() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    accumulator = Accumulator(parameter, Workspace(), new_home)
    accumulator.add([use(accumulator, 1e8)])
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1e8, 1e8]
    # Next to 1e8 numbers are 8 apart: each 3 by itself is lost, 6 is not.
    accumulator.add([use(accumulator, 3.0), use(accumulator, 3.0)])
    assert parameter.grad.tolist() == [1e8 + 8, 1e8 + 8]
    accumulator.add([use(accumulator, 3.0)])
    assert parameter.grad.tolist() == [1e8 + 8, 1e8 + 8]


def test_the_first_use_is_added_to_zeros() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    accumulator = Accumulator(parameter, Workspace(), lambda p: torch.full_like(p, float("nan")))
    accumulator.add([use(accumulator, 1.0), use(accumulator, 2.0)])
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 3.0]
