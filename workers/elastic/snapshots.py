"""Snapshots: whole states of layers as some committed step left them, in host memory.

Every few steps each rank copies the layers that it owns, and fetches, while training goes on, those that it keeps for
other ranks. Once all ranks have all of a snapshot, it takes the place of the one before: the living ranks can always go
back to one of the two together. Knows no plan, no commit and no network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from planner.shards import Piece
from workers.process.host_memory import free_host_bytes
from workers.protocol import SnapshotHeld
from workers.state.layer_state import LayerState, bytes_of, host_copy
from workers.state.loss_scale import LossScale

Bring = Callable[[threading.Event], LayerState]
"""Fetches one state; gives up when the event is set."""

ASK_AGAIN_S = (0.2, 1.0, 3.0)
"""How long to wait before each further attempt to fetch a state; then the snapshot is given up."""
LEAST_FREE_BYTES = 2**28
"""Host memory that snapshots leave to others."""


@dataclass
class _Snapshot:
    """One step's. Its states never change."""

    loss_scale: LossScale | None = None
    states: dict[Piece, LayerState] = field(default_factory=dict)
    lacking: set[Piece] = field(default_factory=set)
    """Still to be fetched."""


class Snapshots:
    """The snapshots that one rank has, over all generations.

    Args:
        keep: offers states of a step to other ranks, until `let_go`.
        let_go: stops offering the states of a step.
        free_bytes: returns how much host memory is left.
    """

    def __init__(
        self,
        keep: Callable[[int, Iterable[LayerState]], None],
        let_go: Callable[[int], None],
        free_bytes: Callable[[], int] = free_host_bytes,
    ) -> None:
        self._keep = keep
        self._let_go = let_go
        self._free_bytes = free_bytes
        self._by_step: dict[int, _Snapshot] = {}
        self._change = threading.Lock()
        self._stopped = threading.Event()
        self._fetching: threading.Thread | None = None
        self.complete = 0
        """Step of the newest snapshot that is complete here; 0: none is."""
        self.given_up = 0
        """Step of the newest one that this rank could not complete; 0: there is none."""
        self.failure: str | None = None
        """Why it could not."""
        self.fetched_layers: tuple[int, ...] = ()
        """The layers of others in the newest one."""
        self.fetched_bytes = 0
        """Size of the states fetched for it."""
        self.fetched_s = 0.0
        """How long it took until it was complete."""

    def take(
        self,
        step: int,
        own: Iterable[LayerState],
        wanted: Mapping[Piece, Bring],
        loss_scale: LossScale | None = None,
    ) -> None:
        """Copy `own`, which are the states of `step`, and begin to fetch those that are `wanted`.

        The snapshot before must be complete or given up. What is here already of that step is taken as it is.
        """
        self.stop()
        self.failure, self.fetched_bytes, self.fetched_s = None, 0, 0.0
        self.fetched_layers = tuple(sorted({piece.layer for piece in wanted}))
        begun_s = time.monotonic()
        snapshot = self._by_step.setdefault(step, _Snapshot())
        snapshot.loss_scale = loss_scale
        snapshot.lacking = {piece for piece in wanted if piece not in snapshot.states}
        if self.complete >= step:
            self.complete = 0
        if self.given_up >= step:
            self.given_up = 0
        try:
            for state in own:
                if Piece(state.layer, state.shard) not in snapshot.states:
                    self._make_room(bytes_of(state))
                    self._take_in(step, snapshot, host_copy(state))
        except MemoryError as error:
            self._give_up(step, error)
            return
        if not snapshot.lacking:
            self.complete = step
            return
        self._stopped = threading.Event()
        self._fetching = threading.Thread(
            target=self._fetch, args=(step, snapshot, wanted, begun_s), name="snapshot", daemon=True
        )
        self._fetching.start()

    def all_have(self, step: int, given_up: int = 0) -> None:
        """Every rank has all of the snapshot of `step`: drop older ones, and that of `given_up`, which some rank could
        not complete."""
        for old in [old for old in self._by_step if old < step or (old == given_up and old > step)]:
            self._drop(old)
        if self.complete == given_up:
            self.complete = step

    def forget_after(self, step: int) -> None:
        """Drop snapshots of steps beyond `step`, which are undone. Call `stop` first."""
        for later in [later for later in self._by_step if later > step]:
            self._drop(later)
        if self.complete > step:
            self.complete = 0
        if self.given_up > step:
            self.given_up = 0

    def stop(self) -> None:
        """Fetch no more; what has arrived stays."""
        self._stopped.set()
        if self._fetching is not None:
            self._fetching.join()
            self._fetching = None

    def states(self, step: int) -> dict[Piece, LayerState]:
        """What is here of the snapshot of `step`."""
        with self._change:
            return {**self._by_step[step].states} if step in self._by_step else {}

    def loss_scale(self, step: int) -> LossScale | None:
        """Of the step after `step`, where the precision needs one and a snapshot knows it."""
        return self._by_step[step].loss_scale if step in self._by_step else None

    def held(self) -> tuple[SnapshotHeld, ...]:
        """What is here, newest first."""
        with self._change:
            return tuple(
                SnapshotHeld(step=step, pieces=tuple(sorted(one.states)), loss_scale=one.loss_scale)
                for step, one in sorted(self._by_step.items(), reverse=True)
            )

    def _fetch(self, step: int, snapshot: _Snapshot, wanted: Mapping[Piece, Bring], begun_s: float) -> None:
        """Fetch in rounds: retry what did not arrive because its owner is busy."""
        stopped, why = self._stopped, None
        for pause_s in (0.0, *ASK_AGAIN_S):
            stopped.wait(pause_s)
            for piece in sorted(snapshot.lacking):
                if stopped.is_set():
                    return
                try:
                    self._make_room(max(map(bytes_of, snapshot.states.values()), default=0))
                    state = wanted[piece](stopped)
                except MemoryError as error:
                    self._give_up(step, error)
                    return
                except Exception as error:
                    why = error
                else:
                    self.fetched_bytes += bytes_of(state)
                    self._take_in(step, snapshot, state)
            if not snapshot.lacking:
                self.fetched_s = time.monotonic() - begun_s
                self.complete = step
                return
        if why is not None and not stopped.is_set():
            self._give_up(step, why)

    def _take_in(self, step: int, snapshot: _Snapshot, state: LayerState) -> None:
        piece = Piece(state.layer, state.shard)
        with self._change:
            snapshot.states[piece] = state
            snapshot.lacking.discard(piece)
        self._keep(step, [state])

    def _make_room(self, needed_bytes: int) -> None:
        """Raises:
        MemoryError: so much more would leave others too little.
        """
        free_bytes = self._free_bytes()
        if free_bytes - needed_bytes < LEAST_FREE_BYTES:
            raise MemoryError(
                f"the next layer takes {needed_bytes:,} bytes, and the host has {free_bytes:,} left, of which"
                f" {LEAST_FREE_BYTES:,} are for others"
            )

    def _give_up(self, step: int, error: Exception) -> None:
        lacking = (
            "there is no host memory for" if isinstance(error, MemoryError) else "layers did not arrive for"
        )
        self.failure = f"{lacking} the snapshot of step {step}: {error}"
        self._drop(step)
        self.given_up = step

    def _drop(self, step: int) -> None:
        with self._change:
            self._by_step.pop(step, None)
        self._let_go(step)
