"""Keyed draws for a thread that builds layers while another trains: it gives up its turn while it computes.

Torch's default generator belongs to the process. Initialising a large layer takes seconds, and training's
forward passes need the generator at every layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workers.process.dispatch_mode import DispatchMode
from workers.reproducibility.rng import keyed, set_state_beside_torch, state_beside_torch, turn

LARGE_ELEMENTS = 2**16
"""An operation on this many elements takes longer than handing the turn over."""


class keyed_in_turns(DispatchMode):
    """Context manager: draws as `rng.keyed` does on the CPU, but other threads take their turn whenever a
    large operation runs inside. Between operations the code inside may use torch's default generator in any
    way.
    """

    def __init__(self, draw_key: int) -> None:
        super().__init__()
        self._keyed = keyed(draw_key)

    def __enter__(self) -> keyed_in_turns:
        self._keyed.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keyed.__exit__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _elements(args) < LARGE_ELEMENTS:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            with _turn_given_away(torch.Generator()):
                return func(*args, **kwargs)
        drawing = _with_generator(func)
        if drawing is None or kwargs.get("generator") is not None or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        own = torch.Generator()
        with _turn_given_away(own):
            return drawing(*args, **{**kwargs, "generator": own})


@contextmanager
def _turn_given_away(own: torch.Generator) -> Iterator[None]:
    """Let others take their turn inside. `own` continues the draws of torch's default generator, which afterwards
    continues those of `own`; random and numpy go on where they were."""
    own.set_state(torch.default_generator.get_state())
    others = state_beside_torch()
    turn.release()
    try:
        yield
    finally:
        turn.acquire()
        torch.default_generator.set_state(own.get_state())
        set_state_beside_torch(others)


def _elements(args: tuple[Any, ...]) -> int:
    """Number of elements of the largest tensor that the operation reads or creates."""
    largest = 0
    for arg in args:
        if isinstance(arg, Tensor):
            largest = max(largest, arg.numel())
        elif isinstance(arg, list | tuple) and arg and all(isinstance(size, int) for size in arg):
            largest = max(largest, math.prod(arg))
    return largest


def _with_generator(func: Any) -> Any:
    """The overload of a random operation that takes a generator by name; None if there is none."""
    for overload in (func, getattr(func.overloadpacket, "generator", None)):
        if overload is not None and any(
            argument.name == "generator" and argument.kwarg_only for argument in overload._schema.arguments
        ):
            return overload
    return None


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    devices = [tensor.device for tensor in tensors] or [torch.device(kwargs.get("device") or "cpu")]
    return all(device.type == "cpu" for device in devices)
