"""A drill's limit fails the allocation that does not fit beside what is alive, and no other."""

from __future__ import annotations

import pytest
import torch

from workers.memory.limit import LimitedMemory, LimitReached
from workers.state.layer_state import LayerState

FLOATS = 1000
BYTES = 4 * FLOATS


def state() -> LayerState:
    return LayerState(layer=0, name="a", weights={"w": torch.zeros(FLOATS)}, buffers={}, slots={}, updates={})


def test_what_dies_makes_room_and_what_is_there_already_counts() -> None:
    held = state()
    with LimitedMemory(3 * BYTES + 100, [held]):
        for _ in range(5):
            torch.ones(2 * FLOATS)
        kept = torch.ones(FLOATS)
        with pytest.raises(LimitReached, match="leaves this rank 12,100 bytes") as caught:
            torch.ones(2 * FLOATS)
        assert (caught.value.held_bytes, caught.value.needed_bytes) == (2 * BYTES, 2 * BYTES)
        del caught
        kept.add_(1)
        assert torch.ones(FLOATS).sum() == FLOATS


def test_a_backward_pass_fails_too_and_a_rank_beyond_its_limit_may_still_free() -> None:
    held = state()
    x = held.weights["w"].requires_grad_()
    with LimitedMemory(BYTES, [held]):
        with torch.no_grad():
            x.mul_(1.0)
        with pytest.raises(LimitReached):
            x * 2
    twice = (x * 2).sum()
    with LimitedMemory(BYTES, [held]), pytest.raises(LimitReached):
        twice.backward()
