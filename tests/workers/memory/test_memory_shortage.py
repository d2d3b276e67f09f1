"""Which errors mean that memory ran out, with which numbers; and that a failed step's tensors do not stay."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path

import pytest
import torch

from workers.control.rank_error import RankError, travelling_errors
from workers.devices.device import CpuDevice
from workers.memory.shortage import RankOutOfMemory, described, shortage_in
from workers.process.host_memory import free_host_bytes
from workers.protocol.errors import MemoryShortage

OF_CUDA = (
    "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 79.10 GiB of which 12.00 MiB is"
    " free."
)


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (torch.OutOfMemoryError(OF_CUDA), round(20.5 * 2**20)),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
                " to allocate 4000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            4_000_000,
        ),
        (MemoryError("of a list"), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_an_allocation_that_failed_is_known_by_type_or_text(error: Exception, needed: int | None) -> None:
    found = shortage_in(error, CpuDevice())
    assert found is not None
    assert found.needed_bytes == needed
    assert found.free_bytes is not None
    assert found.free_bytes > 0
    assert shortage_in(RankOutOfMemory(found)) == found


def test_torch_itself_says_how_much_it_tried_to_allocate() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    found = shortage_in(caught.value)
    assert found is not None
    assert found.needed_bytes == 2**50
    assert found.free_bytes is None, "without a device nobody knows"


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: 719"), OSError("read"), ValueError("out of memory")]
)
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert shortage_in(error) is None


def test_the_numbers_travel_with_the_error_and_the_tensors_stay_behind() -> None:
    left: list[weakref.ref[torch.Tensor]] = []

    def allocates() -> None:
        tensor = torch.zeros(10)
        left.append(weakref.ref(tensor))
        raise MemoryError

    def fails() -> None:
        try:
            allocates()
        except MemoryError as error:
            raise RankOutOfMemory(MemoryShortage(needed_bytes=5, held_bytes=7_000, free_bytes=3)) from error

    with pytest.raises(RankError) as caught, travelling_errors():
        fails()
    assert left[0]() is None, "the error still holds the frames of the calls that it came through"
    there = pickle.loads(pickle.dumps(caught.value))
    assert not there.user_error
    assert not there.cut_off
    assert there.shortage == MemoryShortage(needed_bytes=5, held_bytes=7_000, free_bytes=3)
    assert there.message == (
        "out of memory: 5 bytes could not be allocated beside the 7,000 that its tensors took, with 3 free"
    )
    assert "in allocates" in there.details
    assert described(MemoryShortage()) == "out of memory: an allocation failed"


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    for name, text in (("max", "1000000"), ("current", "400000"), ("stat", "anon 5\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_host_bytes(tmp_path) == 650_000
    (tmp_path / "memory.max").write_text("max")
    assert free_host_bytes(tmp_path) > 1_000_000
    assert free_host_bytes(tmp_path / "nowhere") > 1_000_000
