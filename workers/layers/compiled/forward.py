"""A layer's forward pass as one compiled function: tracing it, compiling what was traced, calling it.

Torch's Dynamo traces the layer and says at each call whether the trace still holds; the trace gets taps
(`tapped.py`) and becomes kernels (`kernels.py`). Each layer has a code object of its own, because Dynamo keeps traces,
their number and what it gives up with the code: what another layer does must not matter.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from workers.layers.blamed import of_the_machine
from workers.layers.compiled.kernels import Compiled, Kernels, cause_of, tracing
from workers.layers.compiled.tapped import Tapped, Taps, with_taps
from workers.layers.deferred import traced
from workers.layers.deferred.defer import UseOf
from workers.layers.deferred.queue import Deferral
from workers.process.user_code import is_users
from workers.protocol.errors import JobError

Tensors = tuple[Tensor, ...]

_log = logging.getLogger(__name__)
_numbers = itertools.count()


class Untraceable(JobError):
    """The layer cannot be traced as it is now; nothing of it was run."""


@dataclass
class _Call:
    """The call that a thread makes: what its compiled function needs beside tensors. Compiled functions outlive their
    layers, so they refer to none."""

    deferral: Deferral
    frozen: Set[int]
    """Identities of the parameters that get no gradient."""
    warms: bool = False
    """Whether it only traces and compiles."""
    traced: list[Traced] = field(default_factory=list)
    """Traces that it met while warming."""


class _Current(threading.local):
    call: _Call


_current = _Current()


class CompiledForward:
    """Takes the place of a layer's module in forward passes of training.

    Args:
        deferral: of the module, whose covered parts mark their products.
    """

    def __init__(self, name: str, module: nn.Module, deferral: Deferral, kernels: Kernels) -> None:
        for mark in traced.MARKS:
            torch.compiler.allow_in_graph(mark)
        self._name = name
        self._told = False
        self._deferral = deferral
        self._backend = _Backend(name, kernels)
        self.frozen: Set[int] = frozenset()
        """Identities of the parameters that get no gradient in the calls that follow."""
        self._function = torch.compile(
            _function_of(module), backend=self._backend, fullgraph=True, dynamic=False
        )

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the compiled module and return what it returns.

        Raises:
            Untraceable: it cannot be traced as it is now.
            JobError: it was traced too often.
        """
        _current.call = _Call(self._deferral, self.frozen)
        self._deferral.compiles = True
        try:
            return self._function(*inputs)
        except Exception as error:
            try:
                self._classify(error)
            except Untraceable as why:
                if not self._told:
                    self._told = True
                    _log.warning("a pass of layer %s is not compiled: %s", self._name, why)
                raise
            raise
        finally:
            self._deferral.compiles = False
            del _current.call

    def warm(self, inputs: Callable[[], Tensors]) -> list[Traced]:
        """Trace a call without running it.

        Args:
            inputs: makes some.

        Returns:
            What is to be compiled: `Traced.compile`.

        Raises:
            Untraceable: it cannot be traced, or would be traced again in each pass.
        """
        with tracing():
            try:
                met = self._warm(inputs())
                before = self._backend.traces
                self._warm(inputs())
            except Exception as error:
                self._classify(error)
                if of_the_machine(cause_of(error)):
                    raise
                raise Untraceable(in_words(error)) from error
        if self._backend.traces > before:
            raise Untraceable("what its code depends on changes from pass to pass")
        return met

    def _warm(self, inputs: Tensors) -> list[Traced]:
        call = _current.call = _Call(self._deferral, frozenset(), warms=True)
        self._deferral.compiles = True
        try:
            self._function(*inputs)
        finally:
            self._deferral.compiles = False
            del _current.call
        return call.traced

    def _classify(self, error: Exception) -> None:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if isinstance(error, FailOnRecompileLimitHit):
            raise JobError(
                f"layer {self._name} was compiled {config.recompile_limit} times, for as many shapes or states of its"
                " code, and is in yet another: let its code depend on tensors alone, or set job.compile = false"
            ) from error
        if isinstance(error, TorchDynamoException) and not of_the_machine(cause_of(error)):
            raise Untraceable(in_words(error)) from error


@dataclass(eq=False)
class _Backend:
    """Compiler backend to which Dynamo hands traces. Dynamo keeps it for ever, so it knows no layer."""

    name: str
    kernels: Kernels
    traces: int = 0

    def __call__(self, module: GraphModule, examples: list[Any]) -> Traced:
        self.traces += 1
        if not _current.call.warms:
            _log.warning(
                "layer %s is compiled while it trains, which takes seconds: its shapes, or what its code depends on,"
                " changed",
                self.name,
            )
        return Traced(with_taps(module), self.kernels)


class Traced:
    """One trace of a layer, compiled when it is needed."""

    def __init__(self, tapped: Tapped, kernels: Kernels) -> None:
        self._outputs = tapped.outputs
        self._products = tapped.products
        self._tapped: Tapped | None = tapped
        self._kernels = kernels
        self._compiled: Compiled | None = None

    @property
    def known(self) -> bool:
        """Whether nothing is left to compile."""
        return self._tapped is None or self._kernels.knows(self._tapped)

    def compile(self) -> Compiled:
        """Compile the trace once: see `Kernels.compiled`."""
        if self._compiled is None:
            assert self._tapped is not None
            self._compiled = self._kernels.compiled(self._tapped)
            self._tapped = None
        return self._compiled

    def __call__(self, *inputs: Tensor) -> Tensors:
        call, products = _current.call, self._products
        if call.warms:
            call.traced.append(self)
            return tuple(like.tensor() for like in self._outputs)
        function = self._compiled or self.compile()
        given = inputs
        if call.frozen:
            given = tuple(t.detach() if id(t) in call.frozen else t for t in inputs)
        live = [number for number, one in enumerate(products) if given[one.weight].requires_grad]
        uses: list[UseOf] = []
        queue = call.deferral.queue
        made: dict[int, Tensor] = {}
        if live:
            anchor = given[products[live[0]].weight]
            taps = Taps.apply(queue, uses, [products[number] for number in live], anchor)
            made = dict(zip(live, taps, strict=True))  # type: ignore[arg-type]
        results = function(*given, *(made[n] if n in made else one.tap() for n, one in enumerate(products)))
        first = len(self._outputs)
        for number in live:
            one = products[number]
            accumulator = call.deferral.accumulator(inputs[one.weight])
            queue.used(accumulator)
            uses.append(one.use_of(accumulator, results[first + one.factor]))
        return tuple(results[:first])


def _function_of(module: nn.Module) -> Callable[..., Any]:
    """A function that calls `module`, with code and globals of its own."""

    def call(*inputs: Tensor) -> Any:
        return module(*inputs)

    code = call.__code__.replace(co_name=f"layer_{next(_numbers)}")
    return FunctionType(code, {"__builtins__": __builtins__, "__name__": __name__}, closure=call.__closure__)


def in_words(error: BaseException) -> str:
    """Reason why the compiler stopped: the title of its error, the explanation, and the user's line if it names one."""
    cause = cause_of(error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    title = lines[0][max(0, lines[0].find("Could not guard")) :].rstrip(".")
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    places = [line for line in lines if line.startswith('File "') and is_users(line.split('"')[1])]
    return ": ".join([title, *explained[:1]]).rstrip(".") + (f" ({places[-1]})" if places else "")
