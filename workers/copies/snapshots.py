"""Snapshots: states of layers as some committed step left them, in host memory, without their fixed parameters.

Every few steps each rank copies the layers that it owns, and fetches those that it keeps for other ranks, all beside
training. Once all ranks have all of a snapshot, it takes the place of the one before: the living ranks can always go
back to one of the two together. Knows no plan, no commit and no network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from planner.shards import Piece
from workers.copies.fetch_in_rounds import fetch_in_rounds
from workers.memory.shortage import shortage_in
from workers.process.host_memory import check_room, free_host_bytes
from workers.process.pinned_memory import beside_computing
from workers.protocol.carried import Carried
from workers.protocol.reports import SnapshotHeld
from workers.state.layer_state import (
    LayerState,
    as_it_is,
    bytes_of,
    host_copy,
    moving_bytes_of,
    with_moments,
    without_fixed,
)

Bring = Callable[[threading.Event], LayerState]
"""Fetches one state; gives up when the event is set."""


@dataclass
class _Snapshot:
    """One step's. Its states never change."""

    carried: Carried | None = None
    states: dict[Piece, LayerState] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Round:
    """One snapshot on its way."""

    step: int
    snapshot: _Snapshot
    before: frozenset[Piece]
    """Pieces that were here already."""
    sharing: int
    begun_s: float = field(default_factory=time.monotonic)
    stopped: threading.Event = field(default_factory=threading.Event)
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once training may change the states that are copied."""
    thread: threading.Thread | None = None


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
        self._change = threading.RLock()
        self._stays_stored = 0
        """Layers, from the first on, whose moments may lie in a file instead of in a snapshot."""
        self._round: _Round | None = None
        self.complete = 0
        """Step of the newest snapshot that is complete here; 0: none is."""
        self.given_up = 0
        """Step of the newest one that this rank could not complete; 0: there is none."""
        self.failure: str | None = None
        """Why it could not."""
        self.fetched: tuple[Piece, ...] = ()
        """The layers, or shards, of others in the newest one."""
        self.fetched_bytes = 0
        """Size of the states fetched for it."""
        self.fetched_s = 0.0
        """Time that it took to complete."""

    def capture(
        self,
        step: int,
        own: Iterable[LayerState],
        wanted: Mapping[Piece, Bring],
        carried: Carried | None = None,
        *,
        sharing: int = 1,
    ) -> None:
        """Begin to copy `own`, which are the states of `step`, and then to fetch those that are `wanted`.

        Call `wait_copied` before weights or optimizer states change; all else of `own` may change at once. The snapshot
        before must be complete or given up. What is here already of that step is taken as it is.

        Args:
            carried: what the step after `step` follows.
            sharing: ranks on this host, each of which does the same.
        """
        self.stop()
        with self._change:
            self.failure, self.fetched_bytes, self.fetched_s = None, 0, 0.0
            self.fetched = tuple(sorted(wanted))
            self.complete = self.complete if self.complete < step else 0
            self.given_up = self.given_up if self.given_up < step else 0
            snapshot = self._by_step.setdefault(step, _Snapshot())
            snapshot.carried = carried
            here = frozenset(snapshot.states)
        now = [as_it_is(state) for state in own if Piece(state.layer, state.shard) not in here]
        taken = _Round(step=step, snapshot=snapshot, before=here, sharing=sharing)
        lacking = {piece: bring for piece, bring in wanted.items() if piece not in here}
        stream = beside_computing(weight.device for state in now for weight in state.weights.values())
        taken.thread = threading.Thread(
            target=self._complete, args=(taken, now, lacking, stream), name="snapshot", daemon=True
        )
        self._round = taken
        taken.thread.start()

    def wait_copied(self) -> None:
        """Wait until the states given to `take` may change."""
        if self._round is not None:
            self._round.copied.wait()

    def all_have(self, step: int, given_up: int = 0) -> None:
        """Every rank has all of the snapshot of `step`: drop older ones. Drop that of `given_up`, which some rank could
        not complete, unless it is the oldest that is here."""
        with self._change:
            for old in [old for old in self._by_step if old < step]:
                self._drop(old)
            if given_up > min(self._by_step, default=given_up):
                self._drop(given_up)
            if self.complete == given_up:
                self.complete = step

    def forget_after(self, step: int) -> None:
        """Drop snapshots of steps beyond `step`, which are undone."""
        with self._change:
            for later in [later for later in self._by_step if later > step]:
                self._drop(later)
            self.complete = self.complete if self.complete <= step else 0
            self.given_up = self.given_up if self.given_up <= step else 0

    def hold_moments(self, prefix: int) -> None:
        """From here on hold the moments of the layers from `prefix` on, and read those that lie in files: these may go
        with the next checkpoint.

        Raises:
            MomentsLost: a file cannot be read.
        """
        with self._change:
            self._stays_stored = prefix
            for step, snapshot in self._by_step.items():
                for piece, state in snapshot.states.items():
                    if (held := self._held(state)) is not state:
                        snapshot.states[piece] = held
                        self._keep(step, [held])

    def _held(self, state: LayerState) -> LayerState:
        return state if state.layer < self._stays_stored else with_moments(state)

    def stop(self) -> None:
        """Copy and fetch no more; what has arrived stays."""
        if self._round is not None and self._round.thread is not None:
            self._round.stopped.set()
            self._round.thread.join()
            self._round = None

    def states(self, step: int) -> dict[Piece, LayerState]:
        """States of the snapshot of `step` that are here."""
        with self._change:
            return {**self._by_step[step].states} if step in self._by_step else {}

    def carried(self, step: int) -> Carried | None:
        """State besides layers that the step after `step` follows, where a snapshot knows that."""
        with self._change:
            return self._by_step[step].carried if step in self._by_step else None

    def held(self) -> tuple[SnapshotHeld, ...]:
        """Snapshots that are here, newest first."""
        with self._change:
            return tuple(
                SnapshotHeld(step=step, pieces=tuple(sorted(one.states)), carried=one.carried)
                for step, one in sorted(self._by_step.items(), reverse=True)
                if one.states
            )

    def _complete(
        self,
        taken: _Round,
        own: Sequence[LayerState],
        wanted: Mapping[Piece, Bring],
        stream: AbstractContextManager[object],
    ) -> None:
        try:
            try:
                with stream:
                    for state in own:
                        if taken.stopped.is_set():
                            return
                        # A first snapshot hashes the fixed parameters, in a copy of them.
                        known = bool(state.fixed_file.sha256)
                        needed_bytes = moving_bytes_of(state) if known else bytes_of(state)
                        check_room(needed_bytes, self._free_bytes(), taken.sharing)
                        self._take_in(taken, host_copy(without_fixed(state)))
            finally:
                taken.copied.set()
            why = self._fetch(taken, wanted)
        except Exception as error:
            why = error
        with self._change:
            if self._by_step.get(taken.step) is not taken.snapshot or taken.stopped.is_set():
                return
            if why is not None:
                self._give_up(taken, why)
            else:
                self.fetched_s = time.monotonic() - taken.begun_s
                self.complete = taken.step

    def _fetch(self, taken: _Round, wanted: Mapping[Piece, Bring]) -> Exception | None:
        """Fetch what is wanted of others; returns why some did not arrive."""

        def fetched(piece: Piece) -> LayerState:
            largest_bytes = max(map(bytes_of, taken.snapshot.states.values()), default=0)
            check_room(largest_bytes, self._free_bytes(), taken.sharing)
            return wanted[piece](taken.stopped)

        for _, came in fetch_in_rounds(sorted(wanted), fetched, taken.stopped):
            if isinstance(came, Exception):
                return came
            self.fetched_bytes += bytes_of(came)
            self._take_in(taken, came)
        return None

    def _take_in(self, taken: _Round, state: LayerState) -> None:
        with self._change:
            if self._by_step.get(taken.step) is taken.snapshot:
                state = self._held(state)
                taken.snapshot.states[Piece(state.layer, state.shard)] = state
                self._keep(taken.step, [state])

    def _give_up(self, taken: _Round, error: Exception) -> None:
        short = shortage_in(error) is not None
        lacking = "there is no host memory for" if short else "layers did not arrive for"
        self.failure = f"{lacking} the snapshot of step {taken.step}: {error}"
        self.given_up = taken.step
        self._drop(taken.step)
        if taken.before:
            states = {piece: state for piece, state in taken.snapshot.states.items() if piece in taken.before}
            self._by_step[taken.step] = _Snapshot(taken.snapshot.carried, states)
            self._keep(taken.step, states.values())

    def _drop(self, step: int) -> None:
        if self._round is not None and self._round.step == step:
            self._round.stopped.set()
        self._by_step.pop(step, None)
        self._let_go(step)
