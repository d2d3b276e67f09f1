"""Progress of the copies that a rank keeps for others: what to report, and when training waits for them."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from planner.shards import Piece, shards_among
from workers.copies.standby import Standbys
from workers.elastic.modules_ahead import ModulesAhead
from workers.protocol.reports import Report, StandbyReport, WarningReport

MOST_BEHIND_BYTES = 2**28
"""Updates that may wait for bases before training waits for them; each wait doubles the limit."""
MOST_STOP_S = 2.0
"""Longest wait at one commit."""


class StandbyWatch:
    """Watches the copies of one rank under one plan.

    Args:
        rank: its number.
        place: its place in the generation.
        coming: what it builds for the next generation: it reports once that is there, too.
    """

    def __init__(
        self, standbys: Standbys, rank: int, place: int, coming: ModulesAhead[Any] | None = None
    ) -> None:
        self._standbys = standbys
        self._rank = rank
        self._place = place
        self._coming = coming
        self._patience_bytes = MOST_BEHIND_BYTES
        self._told_failure: str | None = None
        self._told_given_up: frozenset[Piece] = frozenset()
        self._told = self._told_built = False

    def let_come(self, step: int) -> Report | None:
        """Delay the commit of `step`, for a bounded time, where updates that wait for bases pile up.

        Meanwhile training leaves the links to the bases. Returns the report of the delay, if any.
        """
        standbys, behind = self._standbys, self._standbys.backlog_bytes
        if behind < self._patience_bytes:
            return None
        self._patience_bytes = 2 * behind
        begun_s = time.perf_counter()
        standbys.catch_up(MOST_STOP_S)
        waited_s = time.perf_counter() - begun_s
        lacking = sorted({*standbys.pieces} - standbys.up_to_date)
        text = (
            f"{behind / 1e6:.3g} MB of updates waited for copies at place {self._place}: step {step} waited"
            f" {waited_s:.2f} s for them"
        )
        named = ", ".join(map(str, lacking))
        text += f"; layers [{named}] are still to come" if lacking else ", and they are up to date"
        return WarningReport(rank=self._rank, text=text)

    def news(self, step: int) -> list[Report]:
        """Return new reports on the copies, each once; call it when all ranks have passed the commit of `step`."""
        standbys, news = self._standbys, list[Report]()
        if standbys.failure is not None and standbys.failure != self._told_failure:
            self._told_failure = standbys.failure
            news.append(WarningReport(rank=self._rank, text=standbys.failure))
        given_up = frozenset(standbys.given_up)
        if self._told and given_up - self._told_given_up:
            news.append(self._report(step, given_up - self._told_given_up, given_up=True))
        kept = {*standbys.pieces} - given_up
        builds, built = self._coming is not None and self._coming.wanted, self._built
        if kept and not self._told and kept <= standbys.up_to_date:
            self._told, self._told_built = True, built
            news.append(self._report(step, kept))
        elif builds and built and not self._told_built and (self._told or not kept):
            self._told_built = True
            news.append(self._report(step, ()))
        self._told_given_up = given_up
        return news

    @property
    def _built(self) -> bool:
        return self._coming is None or self._coming.done

    def _report(self, step: int, pieces: Collection[Piece], *, given_up: bool = False) -> StandbyReport:
        return StandbyReport(
            step=step,
            rank=self._place,
            layers=tuple(sorted({piece.layer for piece in pieces})),
            shards=shards_among(pieces),
            bytes=0 if given_up else self._standbys.brought_bytes,
            seconds=0.0 if given_up else self._standbys.brought_s,
            given_up=given_up,
            built=self._built,
        )
