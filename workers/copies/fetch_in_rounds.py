"""States that other ranks offer, fetched one after the other and asked for again. Knows no network and no copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from planner.shards import Piece
from workers.memory.shortage import drop_frames, shortage_in

ASK_AGAIN_S = (0.2, 1.0, 3.0)
"""Seconds to wait before each retry for a state that did not arrive."""

State = TypeVar("State")


def fetch_in_rounds(
    pieces: Iterable[Piece],
    bring: Callable[[Piece], State],
    stopped: threading.Event,
    *,
    short_ends: bool = True,
) -> Iterator[tuple[Piece, State | Exception]]:
    """Yield each of `pieces` with its state as that arrives, or in the end with why it did not.

    In rounds: what did not arrive because its owner is gone or busy holds nothing else up. Ends early once `stopped`
    is set.

    Args:
        bring: fetches one state.
        short_ends: whether a shortage of memory is not worth a retry.
    """
    lacking: dict[Piece, Exception | None] = dict.fromkeys(pieces)
    for pause_s in (0.0, *ASK_AGAIN_S):
        if not lacking or stopped.wait(pause_s):
            return
        for piece in [*lacking]:
            if stopped.is_set():
                return
            try:
                came = bring(piece)
            except Exception as error:
                drop_frames(error)  # they hold what of the state has come, for all rounds
                lacking[piece] = came = error
                if not (short_ends and shortage_in(error) is not None):
                    continue
            del lacking[piece]
            yield piece, came
    if stopped.is_set():
        return
    yield from ((piece, why) for piece, why in lacking.items() if why is not None)
