"""Layer states as peers outside the group follow them: all at one commit, then the changes of every later commit: a
step's parcels, which travel while the ranks still agree on it, and what they agreed on.

The owner's half, without a socket: training puts in what it commits, and the threads of the state server take it out.
Knows no plan.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from planner.codec import from_json
from workers.state.layer_state import LayerState, bytes_of
from workers.state_stream.frames import StreamRefused

MOST_BEHIND_BYTES = 2**28
"""Changes that may wait for a peer; more may where the states that it got first are larger. A link on which as many
changes pile up as it carried states is too slow: the peer fetches the layers while training waits."""


class Over(Exception):
    """Nothing more comes for a follower; says why."""


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """Subscription of a peer: the payload of its `FOLLOW` frame."""

    layers: tuple[int, ...]
    generation: int
    """It follows what this generation of the ranks commits, and no other one."""
    freeze: tuple[int, int] | None = None
    """Epoch and version of the newest freeze plan that it knows."""

    @staticmethod
    def decode(text: bytearray) -> Subscription:
        """Raises:
        StreamRefused: `text` is none.
        """
        try:
            return from_json(Subscription, bytes(text))
        except ValueError as error:
            raise StreamRefused(f"a request to follow layers that is none: {error}") from error


@dataclass(frozen=True, kw_only=True)
class States:
    """The followed layers, with which a peer begins."""

    step: int
    states: tuple[LayerState, ...]
    """Copies on the host."""


@dataclass(frozen=True, kw_only=True)
class Parcels:
    """Changes that `step` makes in followed layers, if it is committed."""

    step: int
    of_layers: Mapping[int, Tensor]
    """Layer -> uint8[bytes], packed: `workers.copies.redundancy`."""

    @property
    def bytes(self) -> int:
        return sum(parcel.nbytes for parcel in self.of_layers.values())

    def as_state(self) -> LayerState:
        """The form in which they travel: buffers, by layer, of a state of no layer."""
        buffers = {str(layer): parcel for layer, parcel in self.of_layers.items()}
        return LayerState(layer=-1, name="parcels", weights={}, buffers=buffers, slots={}, updates={})

    @staticmethod
    def of_state(step: int, state: LayerState) -> Parcels:
        """Raises:
        StreamRefused: `as_state` did not return it.
        """
        try:
            return Parcels(step=step, of_layers={int(layer): raw for layer, raw in state.buffers.items()})
        except ValueError as error:
            raise StreamRefused(f"parcels of no layer: {error}") from error


@dataclass(frozen=True, kw_only=True)
class CommittedChange:
    """Commit of `step`, whose parcels came before, and how to apply them."""

    step: int
    scale: float
    """See `workers.commit.commit.CommitDecision`, also for the next three; `scores` are those of all layers."""
    lr: float
    skipped: bool
    scores: Mapping[int, float] = field(default_factory=dict)
    behind: int = 0
    """Number of changes that wait behind this one; 0: the peer has all there is once it has applied this one."""

    @staticmethod
    def decode(text: bytearray) -> CommittedChange:
        """Raises:
        StreamRefused: `text` is none.
        """
        try:
            return from_json(CommittedChange, bytes(text))
        except ValueError as error:
            raise StreamRefused(f"a change of layers that is none: {error}") from error


class Follower:
    """One peer: what waits to be sent to it."""

    def __init__(self, subject: Subscription) -> None:
        self.subject = subject
        self._there = threading.Condition()
        self._states: States | None = None
        self._coming: deque[Parcels | CommittedChange] = deque()
        self._behind_bytes = 0
        self._most_bytes = MOST_BEHIND_BYTES
        self.begun = False
        """Whether it has been given the states."""
        self.over: str | None = None
        """Why nothing more comes."""

    def begin(self, states: States) -> None:
        with self._there:
            self._states, self.begun = states, True
            self._most_bytes = max(self._most_bytes, sum(map(bytes_of, states.states)))
            self._there.notify_all()

    def put(self, coming: Parcels | CommittedChange) -> None:
        with self._there:
            self._coming.append(coming)
            self._behind_bytes += coming.bytes if isinstance(coming, Parcels) else 0
            if self._behind_bytes > self._most_bytes:
                self._end(f"{self._behind_bytes / 1e6:.3g} MB of changes wait for it: the link is too slow")
            self._there.notify_all()

    def end(self, why: str) -> None:
        with self._there:
            self._end(why)
            self._there.notify_all()

    def _end(self, why: str) -> None:
        self.over = self.over or why
        self._states = None
        self._coming.clear()
        self._behind_bytes = 0

    def next(self, wait_s: float) -> States | Parcels | CommittedChange | None:
        """Return what is to be sent next; None: there is nothing yet.

        Raises:
            Over: nothing more comes.
        """
        with self._there:
            self._there.wait_for(lambda: self._states or self._coming or self.over is not None, wait_s)
            if self.over is not None:
                raise Over(self.over)
            if self._states is not None:
                states, self._states = self._states, None
                return states
            if not self._coming:
                return None
            coming = self._coming.popleft()
            if isinstance(coming, Parcels):
                self._behind_bytes -= coming.bytes
                return coming
            return replace(coming, behind=sum(isinstance(one, CommittedChange) for one in self._coming))


class Followers:
    """All peers that follow layers of one rank. Thread-safe; training makes the calls from `layers` to `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Follower] = []
        self._generation = 0
        self._closed = False

    def open(self, subject: Subscription) -> Follower:
        """A peer begins to follow; it gets the states of the next commit."""
        follower = Follower(subject)
        with self._lock:
            if self._closed or subject.generation < self._generation:
                follower.end(f"generation {subject.generation} is over")
            else:
                self._all.append(follower)
        return follower

    def drop(self, follower: Follower) -> None:
        """The peer is gone."""
        with self._lock:
            self._all = [other for other in self._all if other is not follower]
        follower.end("it is gone")

    @property
    def layers(self) -> frozenset[int]:
        """The layers whose next parcels some peer needs."""
        return frozenset(layer for one in self._ours() if one.begun for layer in one.subject.layers)

    def send(self, parcels: Parcels) -> None:
        """Pass on the parcels of a step that is not committed yet, of `layers`."""
        for one in self._ours():
            if not one.begun:
                continue
            if missing := {*one.subject.layers} - parcels.of_layers.keys():
                one.end(f"layers {sorted(missing)} have left this rank")
            else:
                its = {layer: parcels.of_layers[layer] for layer in one.subject.layers}
                one.put(replace(parcels, of_layers=its))

    def commit(
        self,
        change: CommittedChange,
        state_of: Callable[[int], LayerState | None],
        freeze: tuple[int, int] | None,
    ) -> None:
        """Pass a commit on; peers that have nothing yet begin with the states after it.

        Args:
            change: of the step whose parcels `send` passed on.
            state_of: layer -> a copy of its state after the commit; None: it is not owned here.
            freeze: the newest freeze plan.
        """
        for one in self._ours():
            layers = one.subject.layers
            if one.begun:
                one.put(change)
            elif one.subject.freeze != freeze:
                one.end("it knows other freeze plans")
            else:
                states = [state for layer in layers if (state := state_of(layer)) is not None]
                if len(states) < len(layers):
                    one.end(f"not all of layers {list(layers)} can be copied here")
                else:
                    one.begin(States(step=change.step, states=tuple(states)))

    def _ours(self) -> list[Follower]:
        with self._lock:
            return [
                one for one in self._all if one.over is None and one.subject.generation == self._generation
            ]

    def begin(self, generation: int) -> None:
        """A generation begins to train: those who followed an earlier one have to begin again."""
        with self._lock:
            self._generation = generation
            old = [one for one in self._all if one.subject.generation < generation]
        for one in old:
            one.end(f"generation {one.subject.generation} is over")

    def end(self, why: str) -> None:
        """Nobody can follow any further."""
        for one in self._ours():
            one.end(why)

    def close(self) -> None:
        """Let nobody follow any more."""
        with self._lock:
            self._closed, everybody = True, [*self._all]
        for one in everybody:
            one.end("this rank ends")
