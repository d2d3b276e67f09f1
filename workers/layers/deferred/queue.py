"""Weight-gradient work deferred past the input gradient, and the accumulators that sum its results.

Knows no module: `modules.py` and `attention.py` put uses of their matrices here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.state.flat import grad_dtype


class Workspace:
    """Scratch that a rank's layers share: no step allocates it again, and it stays in the cache."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    def scratch(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer of `parameter`'s shape, with undefined content."""
        place = (parameter.shape, dtype, parameter.device)
        if place not in self._scratch:
            self._scratch[place] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return self._scratch[place]

    @contextmanager
    def lent(self, accumulators: Iterable[Accumulator]) -> Iterator[None]:
        """Context manager: scratch that `accumulators` first need inside is free again afterwards."""
        known = dict(self._scratch)
        lacking = [one for one in accumulators if one.scratch_bytes == 0]
        try:
            yield
        finally:
            self._scratch = known
            for one in lacking:
                one.forget_scratch()


Home = Callable[[Tensor], Tensor]
"""Parameter -> where its gradient belongs, contiguous, of its shape, in what its gradients are summed; with undefined
content."""


def new_home(parameter: Tensor) -> Tensor:
    """Memory of its own."""
    return torch.empty_like(parameter, dtype=grad_dtype(parameter), memory_format=torch.contiguous_format)


@dataclass(slots=True, eq=False)
class Accumulator:
    """Where the gradients of one parameter are summed, with its cast and its scratch."""

    parameter: Tensor
    workspace: Workspace
    home: Home
    _scratch: Tensor | None = field(default=None, init=False)
    _cast: Tensor | None = field(default=None, init=False)
    _cast_version: int = field(default=-1, init=False)

    @property
    def cast_bytes(self) -> int:
        """Size of the cast that it keeps."""
        return 0 if self._cast is None else self._cast.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch that it shares with parameters of its shape."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def forget_scratch(self) -> None:
        """Take scratch from the workspace again when some is needed."""
        self._scratch = None

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The parameter, detached, in `dtype`; cast once per change of it rather than once per microbatch."""
        parameter = self.parameter
        if parameter.dtype == dtype:
            return parameter.detach()
        if self._cast is None or self._cast.dtype != dtype or self._cast_version != parameter._version:
            self._cast, self._cast_version = parameter.detach().to(dtype), parameter._version
        return self._cast

    def add(self, uses: list[ParameterUse]) -> None:
        """Form the sum of `uses`, in order and in the dtype they were computed in, and add it once to `.grad`."""
        parameter, first = self.parameter, uses[0]
        grad, fresh = parameter.grad, parameter.grad is None
        adds = [use.add for use in uses if use.add is not None] if first.add is not None else []
        if adds and len(adds) == len(uses):
            self._add_wide(adds)
            return
        if grad is None:
            grad = parameter.grad = self.home(parameter)
            if len(uses) == 1 and first.dtype == grad.dtype:
                first.form(grad)
                return
        scratch = self._scratch
        if scratch is None or scratch.dtype != first.dtype:
            scratch = self._scratch = self.workspace.scratch(parameter, first.dtype)
        first.form(scratch)
        for use in uses[1:]:
            scratch.add_(use.form(None))
        if fresh:
            grad.copy_(scratch)
        else:
            grad.add_(scratch)

    def _add_wide(self, adds: Sequence[Callable[[Tensor], None]]) -> None:
        """The same of uses that each add their own in one pass. To zeros where there is nothing to add to: with the
        same kernel, whether the gradient is the first."""
        parameter = self.parameter
        if parameter.grad is None:
            total = parameter.grad = self.home(parameter).zero_()
        elif len(adds) == 1:
            total = parameter.grad
        else:
            total = self._scratch = self.workspace.scratch(parameter, parameter.grad.dtype).zero_()
        for add in adds:
            add(total)
        if total is not parameter.grad:
            parameter.grad.add_(total)


@dataclass(slots=True)
class ParameterUse:
    """One use of a parameter in one microbatch: enough to form its gradient later."""

    accumulator: Accumulator
    form: Callable[[Tensor | None], Tensor]
    """Forms the gradient, float[parameter.shape]: into the given tensor, or a new one."""
    dtype: torch.dtype
    """Compute dtype of `form`: the autocast dtype, or the parameter's own."""
    add: Callable[[Tensor], None] | None = None
    """Forms it in 32 bits and adds it to the given tensor in the same pass, where the device can."""


@dataclass(slots=True, eq=False, kw_only=True)
class WeightGradQueue:
    """The uses of one layer's parameters in one microbatch, in the order the backward pass met them."""

    anchored: bool = False
    """Whether the backward walk goes to chosen parameters and inputs only: then each use has to hang on its own
    parameter, or the walk may pass it by."""
    _uses: dict[Accumulator, list[ParameterUse]] = field(default_factory=dict, init=False)
    _forward_uses: dict[Accumulator, int] = field(default_factory=dict, init=False)
    at_once: bool = field(default=False, init=False)
    """Whether each gradient is formed as soon as its last use has come, while its operands are in the cache."""
    closed: bool = field(default=False, init=False)
    """Whether a further walk of the graph goes on, whose uses were drained already."""
    walked: bool = field(default=False, init=False)
    """Whether the backward pass of the microbatch has begun: only that one queues."""
    odd: str = field(default="", init=False)
    """First use in the forward pass that no deferral understands: stock autograd must compute the entire layer."""

    def found_odd(self, what: str) -> None:
        """The forward pass met `what`; the first counts."""
        self.odd = self.odd or what

    def used(self, accumulator: Accumulator) -> None:
        """The forward pass used the parameter."""
        self._forward_uses[accumulator] = self._forward_uses.get(accumulator, 0) + 1

    def reached(
        self, accumulator: Accumulator, use_of: Callable[..., ParameterUse], *grads: Tensor | None
    ) -> None:
        """A walk of the graph reached a use, with the gradients of its outputs, where they have any."""
        if self.closed:
            return
        if not self.walked:
            self.found_odd("it takes gradients in its forward pass")
        elif any(grad is not None for grad in grads):
            self.put(use_of(*grads))
        else:
            self._forward_uses[accumulator] -= 1
            self._form_if_complete(accumulator)

    def put(self, use: ParameterUse) -> None:
        """The backward pass reached a use."""
        accumulator = use.accumulator
        self._uses.setdefault(accumulator, []).append(use)
        self._form_if_complete(accumulator)

    def _form_if_complete(self, accumulator: Accumulator) -> None:
        uses = self._uses.get(accumulator)
        if uses and self.at_once and len(uses) == self._forward_uses[accumulator]:
            accumulator.add(self._uses.pop(accumulator))

    def drain(self) -> None:
        """Form every gradient that is queued and add it to its parameter's `.grad`, once per parameter."""
        while self.form_next() is not None:
            pass

    def form_next(self) -> Accumulator | None:
        """Form the gradient that is due next; None where nothing is queued."""
        # Where each gradient is formed at once, nothing is queued: then entering no_grad would be wasted time.
        if not self._uses:
            return None
        accumulator = next(iter(self._uses))
        with torch.no_grad():
            accumulator.add(self._uses.pop(accumulator))
        return accumulator


@dataclass
class Deferral:
    """State that the overridden forwards of one layer share: the queue of the microbatch that runs now."""

    workspace: Workspace
    home: Home = new_home
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    """By identity of the parameter: two modules may share one."""
    compiles: bool = False
    """Whether the layer is compiled as a whole, so that taps take the place of hooks; else what a user compiles of it
    keeps its own gradients."""

    def accumulator(self, parameter: Tensor) -> Accumulator:
        return self.accumulators.setdefault(id(parameter), Accumulator(parameter, self.workspace, self.home))
