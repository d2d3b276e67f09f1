"""Whether a user's code has left PyTorch's modes as they were: gradients in this thread, the default type in all."""

from __future__ import annotations

import torch

from workers.protocol.errors import JobError


def check_modes_kept(who: str) -> None:
    """Raises:
    JobError: gradients are off, or tensors are made in another type, since the code of `who` has run.
    """
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise JobError(
            f"{who}: its code switches gradients off, and leaves them off (torch.set_grad_enabled(False)), so that"
            " nothing would be trained: use `with torch.no_grad():` around what needs none"
        )
    made = torch.get_default_dtype()
    if made != torch.float32:
        torch.set_default_dtype(torch.float32)
        raise JobError(
            f"{who}: its code has tensors made in {made} (torch.set_default_dtype) and leaves it so: which layers are"
            " made in it would depend on the partition. Name the type where they are made (dtype=...), or set it back"
        )
