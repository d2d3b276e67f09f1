"""Copies between host and GPU: whole, part by part, and none where a tensor is there already."""

from __future__ import annotations

import pytest
import torch
from jobs import DEVICE

from workers.process import pinned_memory
from workers.process.pinned_memory import (
    Staging,
    give_pinned_memory_back,
    parts_on_host,
    pinned,
    to_device,
    to_host,
)
from workers.state.layer_state import fresh

ON_A_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs FRESHET_TEST_DEVICE=cuda")
CPU = torch.device("cpu")


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()
    assert to_device(tensor, CPU).data_ptr() == tensor.data_ptr()
    (part,) = parts_on_host(tensor)
    assert (part.data_ptr(), part.dtype, len(part)) == (tensor.data_ptr(), torch.uint8, 24)


def test_parts_have_the_bytes_in_c_order() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    (part,) = parts_on_host(tensor)
    assert part.view(torch.int16).tolist() == [0, 3, 1, 4, 2, 5]
    assert [len(part) for part in parts_on_host(torch.empty(0))] == [0]


@ON_A_GPU
def test_parts_of_a_gpus_tensor_come_in_order_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "STAGED_BYTES", 32)
    for elements in (0, 1, 7, 8, 9, 41):
        tensor = torch.randn(elements, device=DEVICE)
        parts = [bytes(part.numpy().data) for part in parts_on_host(tensor)]
        assert all(len(part) <= 32 for part in parts)
        assert b"".join(parts) == tensor.cpu().numpy().tobytes()
        assert fresh(tensor).equal(tensor.cpu())


@ON_A_GPU
def test_a_batch_may_be_written_over_as_soon_as_it_is_read() -> None:
    given = torch.ones(2**20).pin_memory()
    torch.cuda._sleep(10**8)  # the copy waits for this
    there = to_device(given, DEVICE)
    given.zero_()
    assert there.cpu().eq(1).all()
    assert to_host(there).is_pinned()


def test_the_oldest_torch_gives_pinned_memory_back_under_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    give_pinned_memory_back()  # nothing, where no GPU is used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: given.append(1), raising=False)
    give_pinned_memory_back()
    assert given == [1]


@ON_A_GPU
def test_pinned_memory_that_nobody_uses_goes_back_to_the_host() -> None:
    def allocated() -> int:
        # Before the first pinned byte there may be no such entry.
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)

    give_pinned_memory_back()
    before = allocated()
    kept = pinned((2**20,), torch.uint8)
    del kept
    assert allocated() > before
    give_pinned_memory_back()
    assert allocated() == before


@pytest.mark.parametrize("device", [CPU, pytest.param(DEVICE, marks=ON_A_GPU)], ids=str)
def test_what_was_brought_ahead_has_its_values(device: torch.device) -> None:
    staging = Staging(device)
    for round_number in range(3):
        given = [torch.full((2**18,), float(round_number)), torch.arange(5)]
        taken = staging.begin(given).collect()
        assert [t.device.type for t in taken] == [device.type] * 2
        assert taken[0].sum().item() == round_number * 2**18
        assert taken[1].tolist() == [0, 1, 2, 3, 4]


@ON_A_GPU
def test_what_is_brought_ahead_waits_for_nothing_that_is_computed() -> None:
    given = torch.ones(2**20)
    staging = Staging(DEVICE)
    staging.begin([given]).collect()
    torch.cuda._sleep(10**9)
    computed = torch.cuda.Event()
    computed.record()
    staged = staging.begin([given])
    assert staged.there is not None
    staged.there.synchronize()
    assert not computed.query()
    given.zero_()
    assert staged.collect()[0].eq(1).all()
