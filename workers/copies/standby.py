"""Copies of layers that other ranks own, kept up to date by the same updates: a failed rank's successor starts from
them.

A copy begins with a base; its updates wait until the base arrives. It is live on the rank's device, or lies in host
memory (`workers/copies/host_copies.py`). Threads beside training do the work; training waits only when updates fall
several commits behind. Knows no network: the caller passes bases and parcels.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from planner.shards import Piece
from workers.copies.fetch_in_rounds import fetch_in_rounds
from workers.copies.host_copies import HostCopy, HostForm
from workers.copies.updates import Update, UpdateDecision, Updates
from workers.freezing.plans import FreezeSettings
from workers.layers.layer import Layer
from workers.memory.shortage import shortage_in
from workers.process.host_memory import give_freed_pages_back
from workers.state.layer_state import (
    LayerState,
    bytes_of,
    host_copy,
    in_host_memory,
    moving_bytes_of,
    with_moments,
)
from workers.state.optim import Optimizer

Base = tuple[Layer | None, LayerState]
"""A layer's state with the layer that would compute with it, or that of a shard alone."""
BringBase = Callable[[Piece, threading.Event], Base]
"""Layer or shard -> its state at the step where the generation began; gives up when the event is set."""


COMMITS_BEHIND = 3
"""Commits whose updates may wait before training waits for them."""
CLOSE_S = 5.0


class LiveCopy(Updates):
    """A copy on this rank's device, with all commits applied; `HostCopy` is one in host memory. It has its moments in
    memory: the file that its owner has them in may go once the layer thaws, and a copy may be behind."""

    def __init__(self, base: Base, freeze: FreezeSettings, optimizer: Optimizer, step: int) -> None:
        layer, state = base
        self.base: Base = layer, with_moments(state)
        super().__init__(self.base[1], freeze, optimizer, step)


@dataclass
class _Copy:
    """The copy of one layer or shard. Its tensors belong to the thread that applies updates."""

    kept: LiveCopy | HostCopy | None = None
    """With all updates but those that wait; None: its base is still to come."""
    waiting: deque[Update] = field(default_factory=deque)
    late: list[tuple[int, UpdateDecision]] = field(default_factory=list)
    """Commits whose parcels the owner holds back."""
    given_up: bool = False
    """There is no base, and none will arrive: its updates are dropped."""
    rising: bool = False
    """It is wanted on the device: there it stays, or it is on its way."""
    sinking: bool = False
    """It is live, and on its way to host memory unless it is wanted on the device."""
    stays: bool = False
    """It could not be brought there."""

    @property
    def here(self) -> bool:
        """Whether its base has arrived."""
        return self.kept is not None

    @property
    def current(self) -> bool:
        return self.here and not self.waiting

    @property
    def waiting_bytes(self) -> int:
        """Size of the updates that wait."""
        return sum(update.parcel.nbytes for update in tuple(self.waiting))


class Standbys:
    """The copies that one rank keeps in one generation.

    Args:
        pieces: the copied layers or shards.
        bases: the copies already at the step where it begins. Those without a layer are never changed.
        step: the last step committed there.
        host: has them kept in host memory; live bases are brought there once training goes on. None: on the device.
        known: copies in host memory, already at that step; they go on.
        given_up: copies that this rank will not have.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        bases: Mapping[Piece, Base],
        *,
        freeze: FreezeSettings,
        optimizer: Optimizer,
        step: int,
        host: HostForm | None = None,
        known: Mapping[Piece, HostCopy] | None = None,
        given_up: Collection[Piece] = (),
    ) -> None:
        self.host = host
        self._freeze = freeze
        self._step = step
        self._optimizer = optimizer
        self._copies = {piece: _Copy(given_up=piece in given_up) for piece in pieces}
        self._stopped = threading.Event()
        self._room = threading.Semaphore(COMMITS_BEHIND)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._moving = threading.Lock()
        """Held where a copy leaves the device, or is wanted there."""
        self._broken = False
        self._began_s = time.monotonic()
        self._applier: threading.Thread | None = None
        self._bringer: threading.Thread | None = None
        self._resting = False
        self.failure: str | None = None
        """Why some copies will not arrive, or all are lost. The layers that this rank owns are unaffected."""
        self.brought_bytes = 0
        """Bytes fetched for bases."""
        self.brought_s = 0.0
        """When the last of them was up to date, in seconds since this object was made."""
        for piece, copy in (known or {}).items():
            if piece in self._copies:
                copy.freeze = freeze
                self._copies[piece].kept = copy
        for piece, base in bases.items():
            if self._copies[piece].here:
                continue
            self._begin(piece, base, step)
            if host is not None and isinstance(self._copies[piece].kept, LiveCopy):
                self._sink(piece, host)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._copies)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that they are of."""
        return tuple(dict.fromkeys(piece.layer for piece in self._copies))

    @property
    def lacking(self) -> tuple[Piece, ...]:
        """Pieces whose base is still to arrive."""
        return tuple(piece for piece, copy in self._copies.items() if not (copy.here or copy.given_up))

    @property
    def given_up(self) -> tuple[Piece, ...]:
        """Pieces that will not arrive, or that were given up for want of host memory."""
        return tuple(piece for piece, copy in self._copies.items() if copy.given_up)

    @property
    def current(self) -> bool:
        """Whether every copy has its base and no waiting update."""
        return len(self.up_to_date) == len(self._copies)

    @property
    def bases_done(self) -> bool:
        """Whether every base has arrived or been given up."""
        copies = self._copies.values()
        return self._broken or all(copy.here or copy.given_up for copy in copies)

    @property
    def up_to_date(self) -> frozenset[Piece]:
        """Pieces that have their base and no waiting update."""
        if self._broken:
            return frozenset()
        return frozenset(piece for piece, copy in self._copies.items() if copy.current)

    @property
    def live(self) -> frozenset[Piece]:
        """Up-to-date pieces on the device: this rank could own them from the next step on."""
        return frozenset(piece for piece in self.up_to_date if isinstance(self._copies[piece].kept, LiveCopy))

    @property
    def backlog_bytes(self) -> int:
        """Size of the updates that wait for a base."""
        return sum(copy.waiting_bytes for copy in [*self._copies.values()] if not copy.here)

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

    def raise_to_device(self, pieces: Iterable[Piece]) -> None:
        """Bring those of `pieces` that are copied in host memory to the device, where they stay: this rank is about to
        own them. Those that are there, or come there, without being wanted any more go back."""
        if self.host is None or self._resting:
            return
        wanted, rising = {*pieces}, list[Piece]()
        with self._moving:
            for piece, copy in self._copies.items():
                if piece not in wanted:
                    copy.rising = False
                    if isinstance(copy.kept, LiveCopy) and not copy.sinking:
                        self._sink(piece, self.host)
                elif copy.here and not (copy.rising or copy.stays):
                    copy.rising = True
                    if isinstance(copy.kept, HostCopy):
                        rising.append(piece)
        if rising:
            self._start()
            threading.Thread(
                target=self._build, args=(self.host, rising), name="standby-raising", daemon=True
            ).start()

    def apply(self, step: int, parcels: Mapping[Piece, Tensor], decision: UpdateDecision) -> None:
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
                copy.waiting.append(Update(step, parcels[piece], decision))
                self._catch_up(copy)
            if self.host is not None and not self._resting:
                self._keep_short(step, self.host)

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
                copy.waiting.append(Update(step, parcel, decision))
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

    @property
    def resting(self) -> bool:
        """Whether `rest` has ended: the copies are at the newest step."""
        return self._resting

    def held(self) -> dict[Piece, Base]:
        """Return the copies at the newest step, but for those in host memory. Call `rest` first."""
        return {piece: copy.base for piece, copy in self._complete().items() if isinstance(copy, LiveCopy)}

    def held_on_host(self) -> dict[Piece, HostCopy]:
        """Return the copies in host memory, which know the newest step. Call `rest` first."""
        return {piece: copy for piece, copy in self._complete().items() if isinstance(copy, HostCopy)}

    def _complete(self) -> dict[Piece, LiveCopy | HostCopy | None]:
        assert self._resting
        copies = {piece: self._copies[piece] for piece in sorted(self.up_to_date)}
        return {piece: copy.kept for piece, copy in copies.items() if not copy.late}

    def states(self) -> list[LayerState]:
        """Return the states of the copies that are here on the device."""
        return [copy.kept.base[1] for copy in self._copies.values() if isinstance(copy.kept, LiveCopy)]

    def _begin(self, piece: Piece, base: Base, step: int) -> None:
        """Begin the copy of `piece` with its base, which is at `step`."""
        copy, (layer, state) = self._copies[piece], base
        if self.host is not None and layer is None and in_host_memory(state):
            copy.kept = self._host_copy(state, step, self.host)
        else:
            copy.kept = LiveCopy(base, self._freeze, self._optimizer, step)

    def _host_copy(self, state: LayerState, step: int, host: HostForm) -> HostCopy:
        return HostCopy(
            state,
            step,
            device=host.device,
            stream=host.stream,
            freeze=self._freeze,
            optimizer=self._optimizer,
            check_room=host.check_room,
        )

    def _sink(self, piece: Piece, host: HostForm) -> None:
        self._copies[piece].sinking = True
        self._tasks.put(partial(self._do, partial(self._lower, piece, host)))

    def _lower(self, piece: Piece, host: HostForm) -> None:
        """Bring a live copy to host memory, unless it is wanted on the device."""
        copy = self._copies[piece]
        copy.sinking, live = False, copy.kept
        if not isinstance(live, LiveCopy) or copy.rising:
            return
        _, state = live.base
        try:
            host.check_room(bytes_of(state))
            with host.stream.after_computing():
                lowered = self._host_copy(host_copy(state), live.step, host)
        except MemoryError as error:
            lowered, why = None, str(error)
        else:
            why = ""
        with self._moving:
            if copy.rising:
                return
            if lowered is None:
                self._lose({piece: why})
                return
            copy.kept = lowered

    def _build(self, host: HostForm, pieces: Sequence[Piece]) -> None:
        """Build what the copies of `pieces` become on the device."""
        for piece in pieces:
            if self._stopped.is_set():
                return
            try:
                built = host.build(piece, self._step)
            except Exception as error:
                self._leave(piece, error)
            else:
                self._tasks.put(partial(self._do, partial(self._raise, piece, built)))

    def _raise(self, piece: Piece, built: Base) -> None:
        """Let the copy of `piece` go on in what was built for it on the device."""
        copy = self._copies[piece]
        on_host = copy.kept
        if not isinstance(on_host, HostCopy) or not copy.rising:  # given up meanwhile, or not wanted any more
            return
        try:
            on_host.load_into(built[1])
        except Exception as error:
            self._leave(piece, error)
            return
        copy.kept = LiveCopy(built, self._freeze, self._optimizer, on_host.step)
        copy.rising = False

    def _leave(self, piece: Piece, error: Exception) -> None:
        """The copy of `piece` stays in host memory."""
        self.failure = f"the copy of layer {piece} cannot be brought to the device: {error}"
        self._copies[piece].rising, self._copies[piece].stays = False, True

    def _keep_short(self, step: int, host: HostForm) -> None:
        """Keep what copies take of host memory within bounds, after the commit of `step`."""
        kept = {
            piece: copy.kept
            for piece, copy in self._copies.items()
            if isinstance(copy.kept, HostCopy) and not copy.rising
        }
        self._lose(host.keep_short(step, kept, self._stopped.is_set))

    def _lose(self, lost: Mapping[Piece, str]) -> None:
        """Give up copies that the host has no memory for."""
        if not lost:
            return
        why = next(iter(lost.values()))
        self.failure = (
            f"there is no memory for the copies kept here of layers {_named(lost)}: {why}; they stay without a"
            " copy here until the ranks regroup: use fewer elastic.copies, a smaller elastic.refresh_every, or"
            ' elastic.copies_in = "device"'
        )
        self._give_up([*lost])

    def _start(self) -> None:
        if self._applier is None:
            self._applier = threading.Thread(target=self._run, name="standby-updates", daemon=True)
            self._applier.start()

    def _bring(self, bring: BringBase, pieces: Sequence[Piece]) -> None:
        host, refused, lacking = self.host, dict[Piece, str](), dict[Piece, Exception]()

        def fetched(piece: Piece) -> Base:
            if host is not None:
                host.check_room(self._largest_bytes)
            return bring(piece, self._stopped)

        for piece, came in fetch_in_rounds(pieces, fetched, self._stopped, short_ends=host is not None):
            if not isinstance(came, Exception):
                self._tasks.put(partial(self._do, partial(self._take_in, piece, came)))
            elif host is not None and shortage_in(came) is not None:
                refused[piece] = str(came)
            else:
                lacking[piece] = came
        if self._stopped.is_set():
            return
        if refused:
            self._tasks.put(partial(self._do, partial(self._lose, refused)))
        if lacking:
            *_, why = lacking.values()
            self.failure = f"layers {_named(lacking)} stay without a copy here: {why}"
            self._tasks.put(partial(self._do, partial(self._give_up, [*lacking])))

    def _give_up(self, pieces: Sequence[Piece]) -> None:
        """Drop the updates of these: they would wait for ever and fill the memory."""
        for copy in (self._copies[piece] for piece in pieces):
            copy.given_up = True
            copy.kept = None
            copy.waiting.clear()
            copy.late.clear()
        give_freed_pages_back()

    @property
    def _largest_bytes(self) -> int:
        """Size of the largest base in host memory."""
        kept = [copy.kept for copy in self._copies.values()]
        return max((one.base_bytes for one in kept if isinstance(one, HostCopy)), default=0)

    def _take_in(self, piece: Piece, base: Base) -> None:
        if self.host is not None:
            try:
                self.host.check_room(0)
            except MemoryError as error:
                self._lose({piece: str(error)})
                return
        self._begin(piece, base, self._step)
        self._catch_up(self._copies[piece])
        self.brought_bytes += moving_bytes_of(base[1])
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
            self._stopped.set()
            self.failure = f"the copies kept here of layers {_named(self._copies)} are lost: {error}"

    def _catch_up(self, copy: _Copy) -> None:
        while copy.kept is not None and copy.waiting:
            copy.kept.apply(copy.waiting[0])
            copy.waiting.popleft()


def _named(pieces: Iterable[Piece]) -> str:
    return f"[{', '.join(map(str, pieces))}]"
