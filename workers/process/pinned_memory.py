"""Copies between the host and a GPU through pinned memory: at the speed of the link, and waiting for no more than they
need.

Torch keeps pinned memory for the next copy of that size. Where the system lends no more of it, copies are pageable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

STAGED_BYTES = 2**24
"""Size of each of the two buffers through which a large tensor leaves a GPU part by part."""

_log = logging.getLogger(__name__)
_told: set[str] = set()


def pinned(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """A tensor of the host with undefined content, pinned if the system has memory to pin."""
    return _pinned(partial(torch.empty, tuple(shape), dtype=dtype, memory_format=memory_format))


def _pinned_like(tensor: Tensor) -> Tensor:
    """`pinned`, laid out as `tensor` is."""
    return _pinned(partial(torch.empty_like, tensor, device="cpu"))


def _pinned(empty: Callable[..., Tensor]) -> Tensor:
    try:
        return empty(pin_memory=True)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        if why not in _told:
            _told.add(why)
            _log.warning("no host memory can be pinned, so copies from and to the GPU are slower: %s", why)
        return empty()


def to_host(tensor: Tensor) -> Tensor:
    """The values of `tensor` on the host: those of a GPU as a complete copy, and one of the host as it is."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = _pinned_like(tensor)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def to_device(tensor: Tensor, device: torch.device, *, ours: bool = False) -> Tensor:
    """`tensor` on `device`: to a GPU without waiting, in the order of its current stream.

    Args:
        ours: `pinned` made it, and nobody writes to it again. Any other one is copied on the host first: its owner may
            write to it before the GPU has read it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    if not ours:
        tensor = _pinned_like(tensor).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def give_pinned_memory_back() -> None:
    """Have torch give the pinned memory that it keeps for later copies back to the host."""
    if torch.cuda.is_initialized():
        # The public name came after torch 2.11.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty()


class SideStream:
    """A stream on which a GPU works beside what it computes, for one thread at a time. One for each use: torch keeps
    memory by stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._turn = threading.Lock()

    @contextmanager
    def after_computing(self) -> Iterator[None]:
        """Inside the context the GPU works on this stream, on what its current one has computed by now. Other devices
        work as they do."""
        with self._turn:
            if self._device.type != "cuda":
                yield
                return
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield


@dataclass(frozen=True)
class Staged:
    """Tensors on their way to a device."""

    tensors: tuple[Tensor, ...]
    there: torch.cuda.Event | None = None
    """When they are there; None: they are."""

    def collect(self) -> tuple[Tensor, ...]:
        """The tensors, for what the GPU is given on its current stream from now on."""
        if self.there is not None:
            for tensor in self.tensors:
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(self.there)
                # They were allocated on another stream, which must not have their memory again too early.
                tensor.record_stream(stream)
        return self.tensors


class Staging:
    """Brings tensors of the host to a device before they are needed, from one thread: to a GPU on a stream of its own,
    which waits for nothing that is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensors: Iterable[Tensor]) -> Staged:
        """Tensors of the caller, who may write over them as soon as this returns if the device is a GPU."""
        if self._device.type != "cuda":
            return Staged(tuple(to_device(tensor, self._device) for tensor in tensors))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            staged = tuple(to_device(tensor, self._device) for tensor in tensors)
            there = torch.cuda.Event()
            there.record(self._stream)
        return Staged(staged, there)


def beside_computing(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """A new `SideStream`'s context, for the GPU among `devices`, if there is one."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return nullcontext() if gpu is None else SideStream(gpu).after_computing()


def parts_on_host(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of `tensor` in C order, as uint8[n] of the host: each part is there until the next one is asked for.

    A tensor of the host is one part, without a copy if it is contiguous.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cuda or not len(raw):
        yield raw.cpu()
        return
    stream = torch.cuda.current_stream(raw.device)
    parts = raw.split(STAGED_BYTES)
    buffers = [pinned((len(parts[0]),), torch.uint8) for _ in parts[:2]]
    there: list[torch.Event] = []

    def begin(number: int) -> None:
        part = parts[number]
        buffers[number % 2][: len(part)].copy_(part, non_blocking=True)
        there.append(torch.cuda.Event())
        there[-1].record(stream)

    begin(0)
    for number, part in enumerate(parts):
        if number + 1 < len(parts):
            begin(number + 1)
        there[number].synchronize()
        yield buffers[number % 2][: len(part)]
