"""A PyTorch operation that runs until another thread has drawn random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from workers.reproducibility import rng

_computing, _drawn = threading.Event(), threading.Event()


@torch.library.custom_op("freshet_tests::compute_long", mutates_args=("values",))
def compute_long(values: Tensor) -> None:
    _computing.set()
    assert _drawn.wait(30), "no other thread had its turn"


@contextmanager
def drawing_meanwhile() -> Iterator[None]:
    """Another thread draws random numbers while `compute_long` runs inside this context."""

    def draw() -> None:
        assert _computing.wait(30)
        with rng.keyed(1):
            torch.rand(1)
        _drawn.set()

    _computing.clear()
    _drawn.clear()
    thread = threading.Thread(target=draw)
    thread.start()
    yield
    thread.join()
    assert _drawn.is_set()
