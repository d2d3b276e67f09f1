"""Errors in the code of a user's layers: which layer, in which pass, at which of the user's lines.

They would recur if the step were repeated, so a rank raises them as errors that a user can fix.
"""

from __future__ import annotations

import re
from types import TracebackType

import torch

from workers.process.user_code import what_it_did, where
from workers.protocol.errors import JobError

_OF_THE_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_MACHINE_WORDS = re.compile(r"^(CUDA|cuDNN|cuBLAS|NCCL)\b|DefaultCPUAllocator")
"""Matches the text of a torch `RuntimeError` that the machine causes."""
_OTHER_BITS = re.compile(r"^(\S+) does not have a deterministic implementation")
"""Matches that of an operation for which the device has no kernel that gives the same bits each time."""


class blamed:
    """Reusable context manager: an error inside is raised as a `JobError` that names `code`.

    Errors of the machine pass unchanged: memory or a GPU may have failed just once.

    Args:
        code: what runs inside, e.g. `the forward pass of layer head`.
    """

    __slots__ = ("_code",)

    def __init__(self, code: str) -> None:
        self._code = code

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, JobError) or of_the_machine(error):
            return
        if (operation := _OTHER_BITS.match(str(error))) is not None:
            raise JobError(
                f"{self._code} uses {operation[1]}, for which this device has no kernel that gives the same bits each"
                " time, so that no step could be run again after a failure: write it with other operations, or train"
                f" on another device (cluster.device){where(error)}"
            ) from error
        advice = ""
        if re.search("in.?place", str(error)):
            advice = ": use the operation that returns a new tensor"
        elif "does not require grad" in str(error):
            advice = (
                ": validation keeps no gradients, nor does a pass whose activations are recomputed later, so compute"
                " what you differentiate inside `with torch.enable_grad():`, from inputs that require a gradient"
            )
        raise JobError(f"{self._code} {what_it_did(error)}{advice}{where(error)}") from error


def of_the_machine(error: BaseException) -> bool:
    """Whether it was not the code, so that the same pass may work another time."""
    return isinstance(error, _OF_THE_MACHINE) or _MACHINE_WORDS.search(str(error)) is not None
