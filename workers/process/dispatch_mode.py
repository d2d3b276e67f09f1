"""The base of what watches or changes single operations of torch on one thread, as they are executed."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Context manager: its `__torch_dispatch__` takes every operation of this thread inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping PyTorch's compiler imports it, which takes a second; nothing is compiled inside.
        return False
