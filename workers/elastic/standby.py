"""Copies of layers that other ranks own, kept up to date by the same updates: a failed rank's successor starts from
them.

A copy begins with a base; its updates wait until the base arrives. Threads beside training do the work; training waits
only when updates fall several commits behind. Knows no network: the caller passes bases and parcels.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from planner.shards import Piece
from workers.config import FreezeConfig
from workers.elastic.redundancy import Packing
from workers.freezing.checks import Checks
from workers.freezing.freezer import begin_statistics
from workers.freezing.mask import LayerParameters
from workers.freezing.plans import Settings
from workers.layer import Layer
from workers.state.layer_state import LayerState, bytes_of
from workers.state.optim import Optimizer

Base = tuple[Layer | None, LayerState]
"""A layer's state with the layer that would compute with it, or that of a shard alone."""
BringBase = Callable[[Piece, threading.Event], Base]
"""Layer or shard -> its state at the step where the generation began; gives up when the event is set."""


COMMITS_BEHIND = 3
"""Commits whose updates may wait before training waits for them."""
ASK_AGAIN_S = (0.2, 1.0, 3.0)
"""How long to wait before each retry for a base that did not arrive."""
CLOSE_S = 5.0


class Decided(Protocol):
    """What an update needs of a commit's decision: see `workers.commit.Decision`."""

    @property
    def skipped(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def scores(self) -> Mapping[int, float]: ...


@dataclass(frozen=True)
class _Update:
    step: int
    parcel: Tensor
    decision: Decided


@dataclass
class _Copy:
    """The copy of one layer or shard. Its tensors belong to the thread that applies updates."""

    base: Base | None = None
    packing: Packing | None = None
    checks: Checks | None = None
    freeze: FreezeConfig | None = None
    """The settings of the step after its newest update."""
    waiting: deque[_Update] = field(default_factory=deque)
    late: list[tuple[int, Decided]] = field(default_factory=list)
    """Commits whose parcels the owner holds back."""
    given_up: bool = False
    """No base will arrive: its updates are dropped."""

    @property
    def waiting_bytes(self) -> int:
        """Size of the updates that wait; those of one layer have equal sizes."""
        try:
            return len(self.waiting) * self.waiting[0].parcel.nbytes
        except IndexError:  # meanwhile another thread has applied the last of them
            return 0


class Standbys:
    """The copies that one rank keeps in one generation.

    Args:
        pieces: the copied layers or shards.
        bases: the copies already at the step where it begins.
        step: the last step committed there.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        bases: Mapping[Piece, Base],
        *,
        freeze: Settings,
        optimizer: Optimizer,
        step: int,
    ) -> None:
        self._freeze = freeze
        self._step = step
        self._optimizer = optimizer
        self._copies = {piece: _Copy() for piece in pieces}
        self._stopped = threading.Event()
        self._room = threading.Semaphore(COMMITS_BEHIND)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._broken = False
        self._began_s = time.monotonic()
        self._applier: threading.Thread | None = None
        self._bringer: threading.Thread | None = None
        self._resting = False
        self.failure: str | None = None
        """Why some copies will not arrive, or all are lost. The layers that this rank owns are unaffected."""
        self.brought_bytes = 0
        """Size of the bases fetched."""
        self.brought_s = 0.0
        """When the last of them was up to date, in seconds since this object was made."""
        for piece, base in bases.items():
            self._begin(piece, base)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._copies)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that they are of."""
        return tuple(dict.fromkeys(piece.layer for piece in self._copies))

    @property
    def lacking(self) -> tuple[Piece, ...]:
        """Those whose base has not arrived."""
        return tuple(piece for piece, copy in self._copies.items() if copy.base is None)

    @property
    def current(self) -> bool:
        """Whether every copy has its base and no waiting update."""
        return len(self.up_to_date) == len(self._copies)

    @property
    def settled(self) -> bool:
        """Whether every base has arrived or been given up."""
        copies = self._copies.values()
        return self._broken or all(copy.base is not None or copy.given_up for copy in copies)

    @property
    def up_to_date(self) -> frozenset[Piece]:
        """Those that have their base and no waiting update."""
        if self._broken:
            return frozenset()
        return frozenset(
            piece for piece, copy in self._copies.items() if copy.base is not None and not copy.waiting
        )

    @property
    def backlog_bytes(self) -> int:
        """Size of the updates that wait for a base."""
        return sum(copy.waiting_bytes for copy in [*self._copies.values()] if copy.base is None)

    def catch_up(self, seconds: float) -> None:
        """Wait until every copy is up to date, at most for `seconds`; stop early on a failure."""
        deadline = time.monotonic() + seconds
        while not self.current and self.failure is None:
            if self._stopped.wait(min(0.005, max(0.0, deadline - time.monotonic()))):
                return
            if time.monotonic() >= deadline:
                return

    def bring(self, bring: BringBase) -> None:
        """Fetch the missing bases one after the other, in a thread of their own."""
        if lacking := self.lacking:
            self._start()
            self._bringer = threading.Thread(
                target=self._bring, args=(bring, lacking), name="standby-bases", daemon=True
            )
            self._bringer.start()

    def apply(self, step: int, parcels: Mapping[Piece, Tensor], decision: Decided) -> None:
        """Apply the commit of `step` to the copies.

        Args:
            parcels: by layer or shard; one without a parcel gets it later, from `supply`.
        """

        def update() -> None:
            for piece, copy in self._copies.items():
                if copy.given_up:
                    continue
                if piece not in parcels:
                    copy.late.append((step, decision))
                    continue
                copy.waiting.append(_Update(step, parcels[piece], decision))
                self._catch_up(copy)

        def do_and_make_room() -> None:
            self._do(update)
            self._room.release()

        if not self._copies or self._broken:
            return
        if self._resting:
            self._do(update)
            return
        self._room.acquire()
        self._start()
        self._tasks.put(do_and_make_room)

    def supply(self, piece: Piece, parcels: Sequence[Tensor]) -> None:
        """Apply the commits that lacked a parcel of `piece`; `parcels` are the missing ones, in order."""

        def update() -> None:
            copy = self._copies[piece]
            if copy.given_up:
                return
            for (step, decision), parcel in zip(copy.late, parcels, strict=True):
                copy.waiting.append(_Update(step, parcel, decision))
            copy.late.clear()
            self._catch_up(copy)

        self._start()
        self._tasks.put(partial(self._do, update))

    def rest(self) -> None:
        """End the generation: fetch no more bases and apply what has arrived. Later commits apply at once."""
        self._stopped.set()
        if self._bringer is not None:
            self._bringer.join(CLOSE_S)
        if self._applier is not None:
            self._tasks.put(None)
            self._applier.join()
            self._applier = None
        self._resting = True

    def held(self) -> dict[Piece, Base]:
        """Return the copies at the newest step. Call `rest` first."""
        assert self._resting
        copies = {piece: self._copies[piece] for piece in sorted(self.up_to_date)}
        bases = {piece: copy.base for piece, copy in copies.items() if not copy.late}
        return {piece: base for piece, base in bases.items() if base is not None}

    def states(self) -> list[LayerState]:
        """Return the states of the copies that are here."""
        return [copy.base[1] for copy in self._copies.values() if copy.base is not None]

    def _begin(self, piece: Piece, base: Base) -> None:
        copy, state = self._copies[piece], base[1]
        copy.packing = Packing(state)
        copy.freeze = self._freeze.at(self._step + 1)
        copy.checks = Checks(copy.freeze, {piece.layer: state}, {piece.layer: LayerParameters.of(state)})
        copy.base = base

    def _start(self) -> None:
        if self._applier is None:
            self._applier = threading.Thread(target=self._run, name="standby-updates", daemon=True)
            self._applier.start()

    def _bring(self, bring: BringBase, pieces: Sequence[Piece]) -> None:
        """Fetch in rounds: retry a base that did not arrive because its owner is gone or busy."""
        why: Exception | None = None
        for pause_s in (0.0, *ASK_AGAIN_S):
            self._stopped.wait(pause_s)
            lacking: list[Piece] = []
            for piece in pieces:
                if self._stopped.is_set() or self._broken:
                    return
                try:
                    base = bring(piece, self._stopped)
                except Exception as error:
                    lacking.append(piece)
                    why = error
                else:
                    self._tasks.put(partial(self._do, partial(self._take_in, piece, base)))
            if not lacking:
                return
            pieces = lacking
        if not self._stopped.is_set():
            self.failure = f"layers {_named(pieces)} stay without a copy here: {why}"
            self._tasks.put(partial(self._do, partial(self._give_up, pieces)))

    def _give_up(self, pieces: Sequence[Piece]) -> None:
        """Drop the updates of these: they would wait for ever and fill the memory."""
        for copy in (self._copies[piece] for piece in pieces):
            copy.given_up = True
            copy.waiting.clear()
            copy.late.clear()

    def _take_in(self, piece: Piece, base: Base) -> None:
        self._begin(piece, base)
        self._catch_up(self._copies[piece])
        self.brought_bytes += bytes_of(base[1])
        self.brought_s = time.monotonic() - self._began_s

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _do(self, task: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            task()
        except Exception as error:
            self._broken = True
            self.failure = f"the copies kept here of layers {_named(self._copies)} are lost: {error}"

    def _catch_up(self, copy: _Copy) -> None:
        while copy.base is not None and copy.waiting:
            self._update(copy, copy.base[1], copy.waiting[0])
            copy.waiting.popleft()

    def _update(self, copy: _Copy, state: LayerState, update: _Update) -> None:
        """Do what the owner does at that commit, in the same order."""
        assert copy.packing is not None
        assert copy.checks is not None
        assert copy.freeze is not None
        decision = update.decision
        copy.checks.look(update.step)
        if not decision.skipped:
            parcel = copy.packing.unpack(update.parcel)
            for name, value in parcel.buffers.items():
                state.buffers[name].copy_(value)
            self._optimizer.update_(state, parcel.gradients, decision.scale, update.step - 1)
            if "energy" in state.freezing:
                state.freezing["energy"].copy_(parcel.energies)
        copy.checks.take(decision.scores)
        following = self._freeze.at(update.step + 1)
        if following != copy.freeze:
            if following.method != copy.freeze.method:
                begin_statistics(following, state)
            copy.freeze = following
            copy.checks = Checks(following, {state.layer: state}, {state.layer: LayerParameters.of(state)})


def _named(pieces: Iterable[Piece]) -> str:
    return f"[{', '.join(map(str, pieces))}]"
