"""Errors of allocations that failed for want of memory, on whichever device, with their numbers."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

import torch

from planner.wording import counted
from workers.devices.device import Device
from workers.memory.limit import LimitReached
from workers.protocol.errors import MemoryShortage

_WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED")
"""Matches the text of a torch `RuntimeError` that means the same."""
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class RankOutOfMemory(RuntimeError):
    """This rank ran out of memory. Nothing of the step is kept, and its process lives on."""

    def __init__(self, shortage: MemoryShortage) -> None:
        super().__init__(described(shortage))
        self.shortage = shortage


def shortage_in(error: BaseException, device: Device | None = None) -> MemoryShortage | None:
    """The numbers of `error` if it is of an allocation that failed; None if it is another error.

    Args:
        device: of the rank. Call it before what the step holds is dropped; without it only the error's own numbers
            are known.
    """
    if isinstance(error, RankOutOfMemory):
        return error.shortage
    if isinstance(error, LimitReached):
        return MemoryShortage(
            needed_bytes=error.needed_bytes,
            free_bytes=max(0, error.limit_bytes - error.held_bytes),
            held_bytes=error.held_bytes,
            peak_bytes=None if device is None else device.memory_bytes(),
        )
    failed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not failed and not (isinstance(error, RuntimeError) and _WORDS.search(str(error))):
        return None
    tried = _TRIED.search(str(error))
    return MemoryShortage(
        needed_bytes=round(float(tried[1]) * _UNITS[tried[2]]) if tried else None,
        free_bytes=None if device is None else device.free_bytes(),
        held_bytes=None if device is None else device.held_bytes(),
        peak_bytes=None if device is None else device.memory_bytes(),
    )


def described(shortage: MemoryShortage) -> str:
    """The shortage in words."""
    needed, held, free = shortage.needed_bytes, shortage.held_bytes, shortage.free_bytes
    said = "out of memory: an allocation failed"
    if needed is not None:
        said = f"out of memory: {counted(needed, 'byte')} could not be allocated"
    if held is not None:
        said += f" beside the {held:,} that its tensors took"
    if free is not None:
        said += f", with {free:,} free"
    return said


def drop_frames(error: BaseException) -> None:
    """Clear the variables of the calls that `error` came through: they hold the tensors of the step that failed."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        with suppress(RuntimeError):
            traceback.clear_frames(each.__traceback__)
        left += [each.__cause__, each.__context__]
