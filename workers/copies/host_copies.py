"""Copies of layers in host memory: a base, and the log of the commits since, which nothing has been applied to yet.

Updates are replayed on the kind of device that computed their gradients, so that a copy has its owner's bits: when the
layer is needed, and every few steps for a new base, part after part of one layer at a time. Until that is complete, the
base before and its log stay. Knows no network and no plan.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from planner.shards import Piece
from workers.copies.updates import Update, Updates, looks_at_whole_layers, updated_in_parts
from workers.freezing.freezer import begin_statistics
from workers.freezing.plans import FreezeSettings
from workers.layers.layer import Layer
from workers.memory.shortage import shortage_in
from workers.process.host_memory import check_room, free_host_bytes, give_freed_pages_back
from workers.process.pinned_memory import SideStream, give_pinned_memory_back
from workers.state.layer_state import LayerState, apart_on, bytes_of, host_copy, load_, with_moments
from workers.state.optim import Optimizer

LOOK_S = 0.05
"""Seconds between two looks whether a refresh that waits for its turn is to stop."""
_making = threading.Lock()
"""Held while a new base is made: each takes memory that the next one must not count on."""


class HostCopy:
    """The copy of one layer or shard.

    Args:
        base: its state, in host memory; never changed. Moments that lie in a file are read: see `LiveCopy`.
        step: the last step committed in it.
        device: where updates are replayed.
        stream: of that device, for new bases.
        freeze: the settings that the owner follows.
        check_room: raises `MemoryError` if the host has no room for so many bytes; with subject and verb of what is
            said.
    """

    def __init__(
        self,
        base: LayerState,
        step: int,
        *,
        device: torch.device,
        stream: SideStream,
        freeze: FreezeSettings,
        optimizer: Optimizer,
        check_room: Callable[[int, str], None],
    ) -> None:
        self._base = base = with_moments(base)
        self._step = step
        self._log: deque[Update] = deque()
        self._device = device
        self._stream = stream
        self._optimizer = optimizer
        self._check_room = check_room
        self._change = threading.Lock()
        self.freeze = freeze
        """From the base's step on."""
        self.base_bytes = bytes_of(base)
        self.refused = 0
        """Tries in a row in which `newest` found no room, however many asked."""
        self._refused_before = 0
        """Value of `refused` before this try."""

    @property
    def piece(self) -> Piece:
        return Piece(self._base.layer, self._base.shard)

    @property
    def step(self) -> int:
        """The newest one that it knows."""
        try:
            return self._log[-1].step
        except IndexError:
            return self._step

    @property
    def commits(self) -> int:
        """Number of commits in the log."""
        return len(self._log)

    @property
    def log_bytes(self) -> int:
        return sum(update.parcel.nbytes for update in tuple(self._log))

    @property
    def next_bytes(self) -> int:
        """Size of one commit in the log; 0 before the first."""
        try:
            return self._log[-1].parcel.nbytes
        except IndexError:
            return 0

    def apply(self, update: Update) -> None:
        """Note the next commit, to be replayed later."""
        self._log.append(update)

    def load_into(self, state: LayerState) -> None:
        """Give `state`, live and on the device, the values at the newest step."""
        with self._change:
            self._begin(state)
            load_(state, self._base)
            updates = Updates(state, self.freeze, self._optimizer, self._step)
            for update in self._log:
                updates.apply(update)

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Replace the base by the state at the newest step, and the log by none.

        Args:
            stopped: whether to leave everything as it is.

        Returns:
            Whether it did so.
        """
        with self._change:
            log = tuple(self._log)
            if not log:
                return True
            with self._stream.after_computing():
                if looks_at_whole_layers(self.freeze, self._step + 1, log[-1].step):
                    base = self._updated(log, stopped)
                else:
                    base = updated_in_parts(self._base, log, self._optimizer, self._device, stopped)
            if base is None:
                return False
            self._base, self._step = base, log[-1].step
            for _ in log:
                self._log.popleft()
            self.refused = self._refused_before = 0
        return True

    def _updated(self, log: Sequence[Update], stopped: Callable[[], bool]) -> LayerState | None:
        """The base after the commits of `log`, applied to the whole layer at once; None: `stopped` said so."""
        state = apart_on(self._base, self._device)
        self._begin(state)
        for name, statistic in state.freezing.items():
            statistic.copy_(self._base.freezing[name])
        updates = Updates(state, self.freeze, self._optimizer, self._step)
        for update in log:
            if stopped():
                return None
            updates.apply(update)
        if stopped():
            return None
        return state if self._device.type == "cpu" else host_copy(state)

    def newest(self) -> LayerState:
        """The state at the newest step, in host memory; it stays as it is.

        Raises:
            MemoryError: the host has no room for another base, or the device none for the updates.
        """
        before = self._refused_before
        if self._log:
            with _making:
                try:
                    if self._log:  # nobody has made it meanwhile
                        self._make_room()
                        self.refresh()
                except Exception as error:
                    if shortage_in(error) is None:
                        raise
                    self.refused = max(self.refused, before + 1)
                    raise MemoryError(str(error)) from error
        return self._base

    def begin_try(self) -> None:
        """Begin another try: what is asked for from now on counts for it."""
        self._refused_before = self.refused

    def _make_room(self) -> None:
        what = f"another base of layer {self.piece} takes"
        try:
            self._check_room(self.base_bytes, what)
        except MemoryError:
            _give_memory_back()
            self._check_room(self.base_bytes, what)

    def _begin(self, state: LayerState) -> None:
        """Give `state` the statistics that the base has, with other values."""
        begin_statistics(self.freeze.at(self._step + 1), state)


@dataclass(kw_only=True)
class HostForm:
    """Settings of a rank's copies in host memory.

    Args:
        device: where updates are replayed.
        every: steps from one base of a copy to the next; also the most commits in its log, or twice as many where the
            host has no room for another base.
        build: builds a layer on the device beside training; its values come from elsewhere.
        free_bytes: returns how much host memory is left.
    """

    device: torch.device
    every: int
    build: Callable[[Piece, int], tuple[Layer | None, LayerState]]
    free_bytes: Callable[[], int] = free_host_bytes
    sharing: int = 1
    """Ranks on this host, each of which keeps copies."""
    stream: SideStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = SideStream(self.device)

    def check_room(self, needed_bytes: int, what: str = "the next layer takes") -> None:
        """Check that the host has room for a layer of that size; `what` as for `host_memory.check_room`.

        Raises:
            MemoryError: it has not.
        """
        check_room(needed_bytes, self.free_bytes(), self.sharing, what)

    def keep_short(
        self, step: int, copies: Mapping[Piece, HostCopy], stopped: Callable[[], bool]
    ) -> dict[Piece, str]:
        """Refresh copies after the commit of `step`: those whose turn it is, and others while host memory is short.

        Returns:
            Those to give up, because the host has no memory for them, with the reason.
        """
        lost: dict[Piece, str] = {}
        if stopped():
            return lost
        for number, (piece, copy) in enumerate(copies.items()):
            if copy.commits and ((step + number) % self.every == 0 or copy.commits >= self.every):
                why = self._refresh(copy, stopped)
                if why is not None and copy.commits >= 2 * self.every:
                    lost[piece] = why
        return lost | self._relieve({p: copy for p, copy in copies.items() if p not in lost}, stopped)

    def _relieve(self, copies: Mapping[Piece, HostCopy], stopped: Callable[[], bool]) -> dict[Piece, str]:
        """Make room for the next commit: refresh what has the longest logs, while there is room for another base; then
        give up what is largest."""
        next_bytes = sum(copy.next_bytes for copy in copies.values())
        wanted_bytes = next_bytes + max((copy.base_bytes for copy in copies.values()), default=0)
        for copy in sorted(copies.values(), key=lambda copy: -copy.log_bytes):
            if self._lacks(wanted_bytes) is None:
                return {}
            if copy.commits and self._refresh(copy, stopped) is None:
                _give_memory_back()
        if stopped():  # the generation ends, and recovery needs what is here
            return {}
        lost: dict[Piece, str] = {}
        freed_bytes = 0
        for piece, copy in sorted(copies.items(), key=lambda one: -one[1].base_bytes - one[1].log_bytes):
            why = self._lacks(next_bytes, freed_bytes, "the gradients of the next commit take")
            if why is None:
                break
            lost[piece] = why
            freed_bytes += copy.base_bytes + copy.log_bytes
        return lost

    def _refresh(self, copy: HostCopy, stopped: Callable[[], bool]) -> str | None:
        """Refresh a copy if there is memory for it, on the host and on the device; else why not."""
        # Others may have asked for copies before training went on, and these may still be made.
        while not _making.acquire(timeout=LOOK_S):
            if stopped():
                return None
        try:
            if (why := self._lacks(copy.base_bytes)) is not None:
                return why
            copy.refresh(stopped)
        except Exception as error:
            if shortage_in(error) is None:
                raise
            return f"updates cannot be applied: {error}"
        finally:
            _making.release()
        return None

    def _lacks(self, needed_bytes: int, freed_bytes: int = 0, what: str = "another base takes") -> str | None:
        """Why the host has no room for so much more, once so much has been freed; None: it has."""
        try:
            check_room(needed_bytes, self.free_bytes() + freed_bytes, self.sharing, what)
        except MemoryError as error:
            return str(error)
        return None


def _give_memory_back() -> None:
    give_freed_pages_back()
    give_pinned_memory_back()
