"""The following half of a state stream: a peer outside the group gets layers once, then every change of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.codec import to_json
from workers.protocol.errors import StateStreamError
from workers.state.layer_state import LayerState
from workers.state_stream.encoding import PartialState
from workers.state_stream.fetching import Answers, connect, load
from workers.state_stream.following import CommittedChange, Parcels, States, Subscription
from workers.state_stream.frames import (
    HANDSHAKE_S,
    SILENCE_S,
    Absent,
    FrameKind,
    PeerGone,
    Seal,
    StreamRefused,
    WatchedSocket,
    ask,
)


class FollowedOwner:
    """A connection to the owner of the followed layers, once the request is sent. Call `states` first."""

    def __init__(self, subject: Subscription, line: WatchedSocket, answers: Answers, opener: Seal) -> None:
        self._subject = subject
        self._line = line
        self._answers = answers
        self._opener = opener
        self._headers = self._chunks = self._changes = 0

    def states(self) -> States:
        """Wait for the layers, at the step of the owner's next commit; in fresh CPU allocations.

        Raises:
            StateStreamError: they will not come.
        """
        arrived = [self._state() for _ in self._subject.layers]
        steps = {step for step, _ in arrived}
        states = tuple(state for _, state in arrived)
        if len(steps) != 1 or tuple(state.layer for state in states) != self._subject.layers:
            raise StreamRefused(f"layers {[state.layer for state in states]} of steps {sorted(steps)} came")
        return States(step=steps.pop(), states=states)

    def changes(self) -> Iterator[tuple[CommittedChange, Parcels]]:
        """Wait for each change and its parcels, in the order of commits.

        Raises:
            StateStreamError: no more will come.
        """
        while True:
            parcels = Parcels.of_state(*self._state())
            kind, payload, tag = self._next(FrameKind.CHANGE)
            self._opener.check(kind, self._changes, payload, tag)
            self._changes += 1
            change = CommittedChange.decode(payload)
            if change.step != parcels.step or sorted(parcels.of_layers) != sorted(self._subject.layers):
                raise StreamRefused(
                    f"parcels of layers {sorted(parcels.of_layers)} of step {parcels.step} came"
                )
            yield change, parcels

    def cut(self) -> None:
        """End it at once, from any thread: whoever waits for more gets a `StateStreamError`."""
        self._line.cut()

    def _state(self) -> tuple[int, LayerState]:
        kind, payload, tag = self._next(FrameKind.HEADER)
        self._opener.check(kind, self._headers, payload, tag)
        self._headers += 1
        try:
            loading = PartialState(payload)
            self._chunks = load(loading, self._answers.chunks(loading.bytes), self._opener, self._chunks)
        except ValueError as error:
            raise StreamRefused(str(error)) from error
        return loading.step, loading.state

    def _next(self, wanted: FrameKind) -> tuple[FrameKind, bytearray, bytearray]:
        kind, payload, tag = self._answers.next([wanted, FrameKind.ABSENT])
        if kind is FrameKind.ABSENT:
            self._opener.check(kind, 0, payload, tag)
            raise Absent(payload.decode())
        return kind, payload, tag


@contextmanager
def follow(
    host: str,
    port: int,
    secret: bytes,
    subject: Subscription,
    *,
    waited: Callable[[], None],
    stopped: threading.Event,
) -> Iterator[FollowedOwner]:
    """Follow layers of the rank whose `StateServer` listens at `host`:`port`.

    Args:
        waited: called about every second while the owner has nothing to send.
        stopped: setting it ends all waiting within a fraction of a second.

    Raises:
        StateStreamError: the owner is gone (`PeerGone`), does not know the secret or sends nonsense (`StreamRefused`),
            or no longer sends changes (`Absent`).
    """
    where = f"layers {list(subject.layers)} from {host}:{port}"
    try:
        with connect(host, port) as connected:
            line = WatchedSocket(connected, stopped, HANDSHAKE_S)
            seal, opener = ask(line, secret)
            line.write(seal.frame(FrameKind.FOLLOW, 0, to_json(subject)))
            line.silence_s = SILENCE_S
            yield FollowedOwner(subject, line, Answers(line, opener, waited), opener)
    except StateStreamError as error:
        raise type(error)(f"{where}: {error}") from error
    except OSError as error:
        raise PeerGone(f"{where}: {error.strerror or error}") from error
