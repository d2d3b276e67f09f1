"""Whether a user's code has left gradients on in this thread."""

from __future__ import annotations

import torch

from workers.protocol import JobError


def check_gradients_on(who: str) -> None:
    """Raises:
    JobError: gradients are off, since the code of `who` has run.
    """
    if torch.is_grad_enabled():
        return
    torch.set_grad_enabled(True)
    raise JobError(
        f"{who}: its code switches gradients off, and leaves them off (torch.set_grad_enabled(False)), so that nothing"
        " would be trained: use `with torch.no_grad():` around what needs none"
    )
