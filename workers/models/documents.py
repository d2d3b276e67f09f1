"""Documents that lie side by side in a row: which tokens see each other.

Beside hidden states travel, as integers, the number of each token's document in its row [B, T], from 1 and 0 after the
last, and its position in that document [B, T]. Each block makes its mask of them: a float that travels would get a
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen_by_each(documents: Tensor, window: int | None = None) -> Tensor:
    """The mask of causal attention in documents that do not see each other, bool[B, 1, T, T]: the token of dimension 2
    sees that of dimension 3.

    Args:
        documents: int64[B, T].
        window: tokens that each sees at most, itself included; None: all before it.
    """
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril_()
    return seen if window is None else seen.triu_(1 - window)


def positions_in(documents: Tensor) -> Tensor:
    """The position of each token in its document, from 0: int64[B, T].

    Args:
        documents: int64[B, T].
    """
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - at.where(begins, 0).cummax(1).values


def with_where(hidden: Tensor, where: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Outputs of a layer: hidden states, and the integers beside them that it was given."""
    return (hidden, *where) if where else hidden
