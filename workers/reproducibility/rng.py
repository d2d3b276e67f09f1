"""Random draws that depend only on their purpose, never on the rank or on earlier draws.

Every draw is keyed by (seed, purpose, ...): a layer draws the same numbers on any rank.
"""

from __future__ import annotations

import hashlib
import random
import struct
import threading
from typing import Any

import numpy as np
import torch

turn = threading.RLock()
"""The default generators of torch, random and numpy belong to the process: threads that draw from them take turns."""


def key(seed: int, purpose: str, *parts: int | str) -> int:
    """A 63-bit key for one draw, e.g. `key(seed, "dropout", step, microbatch, layer_name)`."""
    text = repr((seed, purpose, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def uniforms(count: int, seed: int, purpose: str, *parts: int | str) -> list[float]:
    """`count` numbers in [0, 1) from one key and one hash, which is cheaper than a generator for each."""
    raw = hashlib.shake_128(repr((seed, purpose, *parts)).encode()).digest(8 * count)
    return [(number >> 11) * 2.0**-53 for number in struct.unpack(f"<{count}Q", raw)]


class keyed:
    """Context manager: the default generators of torch (the CPU's, and `device`'s if it is a CUDA device), of random
    and of numpy start at `draw_key` inside."""

    # A class, not a generator function: it runs once per layer and microbatch.
    __slots__ = ("_device", "_draw_key")

    def __init__(self, draw_key: int, device: torch.device | None = None) -> None:
        self._draw_key = draw_key
        self._device = device

    def __enter__(self) -> None:
        turn.acquire()
        torch.default_generator.manual_seed(self._draw_key)
        random.seed(self._draw_key)
        np.random.seed(self._draw_key & 0xFFFFFFFF)
        device = self._device
        if device is not None and device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            torch.cuda.default_generators[index].manual_seed(self._draw_key)

    def __exit__(self, *_: object) -> None:
        turn.release()


def state(device: torch.device) -> tuple[Any, ...]:
    """The state of the default generators that `keyed` sets for `device`; equal as long as nobody draws."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    return torch.get_rng_state().numpy().tobytes(), own.numpy().tobytes(), *state_beside_torch()


def state_beside_torch() -> tuple[Any, ...]:
    """The state of the default generators of random and numpy; equal as long as nobody draws."""
    _, numbers, position, *gauss = np.random.get_state(legacy=True)
    return random.getstate(), numbers.tobytes(), position, *gauss  # type: ignore[union-attr]


def set_state_beside_torch(state: tuple[Any, ...]) -> None:
    """Have these generators go on from what `state_beside_torch` returned."""
    of_random, numbers, position, *gauss = state
    random.setstate(of_random)
    np.random.set_state(("MT19937", np.frombuffer(numbers, dtype=np.uint32), position, *gauss))


def generator(draw_key: int) -> torch.Generator:
    """A separate CPU generator for the draw `draw_key`."""
    return torch.Generator().manual_seed(draw_key)
