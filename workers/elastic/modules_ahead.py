"""The modules of layers that a rank will take over, whole or by shard, with the next plan or in the next generation:
built beside training, so that nobody waits for them.

A copy of a shard, or one in host memory, is its state alone. Knows no plan and no state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from planner.shards import Piece

Made = TypeVar("Made")


class ModulesAhead(Generic[Made]):
    """Modules of one rank.

    Args:
        build: returns a piece's layer, alone or with its state; its values are overwritten.
        failed: receives a sentence if a module cannot be built.
    """

    def __init__(self, build: Callable[[Piece], Made], failed: Callable[[str], None]) -> None:
        self._build = build
        self._failed = failed
        self._turn = threading.Lock()
        self._wanted: frozenset[Piece] = frozenset()
        self._built: dict[Piece, Made] = {}
        self._thread: threading.Thread | None = None
        self._broken: frozenset[Piece] = frozenset()
        """Pieces wanted when a build failed: they are not tried again, unless nothing is wanted in between."""

    def ready(self, pieces: Collection[Piece]) -> bool:
        """Whether the modules of `pieces` are there. Begins to build those that are not, and drops all others."""
        with self._turn:
            self._wanted = frozenset(pieces)
            if not pieces:
                self._broken = frozenset()
            self._built = {piece: layer for piece, layer in self._built.items() if piece in self._wanted}
            if self._wanted <= self._built.keys():
                return True
            if self._thread is None and self._wanted != self._broken:
                self._thread = threading.Thread(target=self._run, name="modules-ahead", daemon=True)
                self._thread.start()
        return False

    @property
    def wanted(self) -> bool:
        """Whether it is to build anything, or has built it."""
        return bool(self._wanted)

    @property
    def done(self) -> bool:
        """Whether all modules are there, or some cannot be built."""
        with self._turn:
            return self._wanted <= self._built.keys() or self._wanted == self._broken

    def taken(self) -> dict[Piece, Made]:
        """The modules that were ready; they are the caller's from here on."""
        with self._turn:
            built, self._built, self._wanted, self._broken = self._built, {}, frozenset(), frozenset()
        return built

    def stop(self) -> None:
        """Build no more, and drop what is there. Does not wait for a build under way, whose result is dropped too."""
        with self._turn:
            self._wanted, self._built, self._broken = frozenset(), {}, frozenset()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            try:
                layer = self._build(piece)
            except Exception as error:
                with self._turn:
                    if piece not in self._wanted:
                        continue
                    self._broken, self._thread = self._wanted, None
                self._failed(f"layer {piece} cannot be taken over: {error}")
                return
            with self._turn:
                if piece in self._wanted:
                    self._built[piece] = layer

    def _next(self) -> Piece | None:
        with self._turn:
            lacking = sorted(self._wanted - self._built.keys())
            if not lacking:
                self._thread = None
                return None
            return lacking[0]
