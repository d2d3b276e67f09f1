"""Stage-to-rank placements of the schedule families: looped and folded."""

from __future__ import annotations


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s % P: `chunks` times around the ranks (Megatron-LM's interleaving)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def folded(ranks: int, chunks: int) -> tuple[int, ...]:
    """Down the ranks, up again, and so on: with two chunks a V, first and last stage on rank 0 (ZB-V)."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))
