"""The loss of the built-in families. Knows nothing of pipelines or microbatches."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over every position, in float32.

    Args:
        logits: float[..., K].
        targets: int64[...], in [0, K).
    """
    # One row per position: the loss kernel for flat logits is deterministic on CUDA, the one for [B, K, T]
    # is not.
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
