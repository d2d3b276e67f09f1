"""The loss of the built-in families. Knows nothing of pipelines or microbatches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target of a position that the loss leaves out."""


class MeanCrossEntropy:
    """Mean cross-entropy over the positions that have a target, in float32."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean; 0 where no position has a target.

        Args:
            logits: float[..., K].
            targets: int64[...], in [0, K), or `IGNORED`.
        """
        # One row per position: the loss kernel for flat logits is deterministic on CUDA, the one for [B, K, T]
        # is not.
        rows, flat = logits.float().flatten(0, -2), targets.flatten()
        total = F.cross_entropy(rows, flat, ignore_index=IGNORED, reduction="sum")
        return total / self.target_count(targets).clamp(min=1)

    def target_count(self, targets: Tensor) -> Tensor:
        """The number of positions that have a target, an integer scalar."""
        return (targets != IGNORED).sum()


mean_cross_entropy = MeanCrossEntropy()


def share_of_targets(loss: object, targets: tuple[Tensor, ...]) -> Tensor | None:
    """Share of a microbatch's targets that `loss` is a mean over, a float32 scalar; None: it does not say.

    Microbatches count by their shares, so that the loss of a step is the mean over all targets of the step, whichever
    microbatch they are in. A loss says it by a method `target_count(*targets)`, which returns an integer scalar.
    """
    count = getattr(loss, "target_count", None)
    if count is None:
        return None
    first = targets[0]
    return torch.as_tensor(count(*targets), device=first.device).to(torch.float32) / max(first.numel(), 1)
