"""From a traced layer to kernels, by torch's compiler, set so that the same layer gives the same code in each process.

One compiled function serves all layers of one shape. Whatever would choose by timing is off, and so are the compiler's
caches on disk, which are pickles.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import tracing as tracing_context

from workers.layers.compiled.tapped import Tapped
from workers.protocol.errors import JobError

Compiled = Callable[..., Any]
"""(*inputs, *taps) -> outputs and factors."""

_PREFIX = "freshet-compiled-"
_LOCK = "lock"

_INDUCTOR: Mapping[str, object] = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "benchmark_epilogue_fusion": False,
    "shape_padding": False,
    "freezing": False,
    # Draws are those of the layer that is not compiled, from generators that are keyed.
    "fallback_random": True,
    "compile_threads": 1,
    # Else each process builds three programs to see which vectors this processor has, which takes 9 s.
    "cpp.vec_isa_ok": True,
}
_FUNCTORCH: Mapping[str, object] = {
    "force_non_lazy_backward_lowering": True,  # else the first backward pass compiles
    "donated_buffer": False,
    "enable_autograd_cache": False,
}
_DYNAMO: Mapping[str, object] = {
    # A layer's code must not depend on which shapes came before.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "automatic_dynamic_local_pgo": False,
    "automatic_dynamic_remote_pgo": False,
    "suppress_errors": False,
}

_REMEDY = (
    "install g++ and Python's headers (python3-dev) on every node (Debian, Ubuntu: apt-get install g++ python3-dev),"
    " or set job.compile = false"
)


class Kernels:
    """The compiled functions of this process.

    Args:
        threads: torch threads of the thread that trains.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder: PrivateFolder | None = None
        self._known: dict[str, Compiled] = {}
        self._turn = threading.Lock()

    def check(self, device: torch.device) -> None:
        """Raises:
        JobError: this machine has no compiler for `device`.
        """
        # Before the imports: as the process ends, the compiler makes the folder again, and then it is to go again.
        self._folder = self._folder or PrivateFolder()
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
        from torch.utils._triton import has_triton

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise JobError(f"job.compile = true, but this machine has no C++ compiler: {_REMEDY}") from error
        if device.type == "cuda" and not has_triton():
            raise JobError(
                "job.compile = true, but triton, which compiles for GPUs, is not installed here: pip install triton,"
                " or set job.compile = false"
            )

    def knows(self, tapped: Tapped) -> bool:
        return tapped.shareable and tapped.key in self._known

    def compiled(self, tapped: Tapped) -> Compiled:
        """The function of `tapped`, compiled unless that was done before. Meanwhile no other thread may call modules:
        torch's tracer replaces their methods.

        Raises:
            JobError: the machine's compiler failed.
            Exception: the layer cannot be compiled.
        """
        key = tapped.key
        with self._turn:
            if not tapped.shareable or key not in self._known:
                made = self._compile(tapped)
                if not tapped.shareable:
                    return made
                self._known[key] = made
            return self._known[key]

    def _compile(self, tapped: Tapped) -> Compiled:
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.exc import CppCompileError

        if self._folder is None:
            self._folder = PrivateFolder()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder.path)
        taps = [product.tap().requires_grad_() for product in tapped.products]
        examples: list[Tensor] = [*(like.tensor() for like in tapped.inputs), *taps]
        chosen = {**_INDUCTOR, "cpp.threads": self._threads}
        with ExitStack() as stack:
            stack.enter_context(tracing_context(None))
            stack.enter_context(inductor.patch(_there(inductor, chosen)))
            stack.enter_context(functorch.patch(_there(functorch, _FUNCTORCH)))
            try:
                return compile_fx(tapped.graph, examples)  # type: ignore[return-value]
            except Exception as error:
                cause = cause_of(error)
                if isinstance(cause, CppCompileError):
                    lines = [line for line in str(cause).splitlines() if "error" in line]
                    what = (lines or str(cause).splitlines())[-1].strip()
                    raise JobError(
                        f"job.compile = true, but this machine's C++ compiler failed ({what}): {_REMEDY}"
                    ) from error
                raise

    def close(self) -> None:
        """Delete what was written; the functions stay."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def cause_of(error: BaseException) -> BaseException:
    """Innermost error that the compiler's own error wraps."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return error


@contextmanager
def tracing() -> Iterator[None]:
    """Settings while Dynamo traces in this thread. It would put the generators' states back in the end, in the middle
    of another thread's draws; as all draws are keyed, it need not."""
    from torch._dynamo import config as dynamo

    here = threading.get_ident()

    def unless_here(stock: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(*arguments: Any, **named: Any) -> None:
            if threading.get_ident() != here:
                stock(*arguments, **named)

        return set_rng_state

    with (
        dynamo.patch(_there(dynamo, _DYNAMO)),
        patch.object(torch.random, "set_rng_state", unless_here(torch.random.set_rng_state)),
        patch.object(torch.cuda, "set_rng_state", unless_here(torch.cuda.set_rng_state)),
    ):
        yield


def _there(config: Any, chosen: Mapping[str, object]) -> dict[str, object]:
    """Settings of `chosen` that this version of torch has."""
    known = config._config
    return {name: value for name, value in chosen.items() if name in known}


class PrivateFolder:
    """The folder in which this process compiles: a new one that only this user may enter, locked while it lives.

    What lies there is machine code for this processor, and what the compiler would load from there again it would run.
    So no other process writes there, nothing is taken from an earlier one, and whatever a killed process left is
    removed.
    """

    def __init__(self) -> None:
        remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        made = self.path / "new"
        self._lock: int | None = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(self.path / _LOCK)  # nobody finds it unlocked
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete it; what was loaded from there stays loaded."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left() -> None:
    """Delete the folders of this user whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
