"""State streams: a rank offers copies of its layers' states, and others fetch them while training goes on.

They are authenticated and chunked, and states give way to training (DynPipe V-C2 and V-C3). Knows no plan and no
commit.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from planner.shards import Piece
from workers.protocol.orders import StatePart
from workers.state.layer_state import LayerState, part_of, without_fixed
from workers.state_stream.fetching import fetch as fetch
from workers.state_stream.flow import JOIN_S, Flow
from workers.state_stream.following import CommittedChange, Followers, Over, Parcels, States, Subscription
from workers.state_stream.frames import (
    HANDSHAKE_S,
    MOST_BYTES,
    SILENCE_S,
    FrameKind,
    PeerGone,
    StateWish,
    StreamRefused,
    WatchedSocket,
    answer,
    read_frame,
)
from workers.state_stream.rows import KeptRows, RowsWish, answer_rows
from workers.state_stream.sending import Delivery, prioritize

MakeState = Callable[[], LayerState]
"""Makes a state that somebody asks for."""

MOST_PEERS = 512
"""Most peers that know the secret, served at a time: 64 ranks may fetch eight layers each from one server."""
MOST_STRANGERS = 512
"""Most connections that have not yet proved that they know the secret; one more, and the oldest is cut
off."""


class StateServer:
    """Serves layer states to peers that know the job's secret. Listens as soon as it is created.

    Args:
        secret: the job's secret.
        host: address to listen on; the kernel chooses the port.
        busy: whether a training message is on its way out of this rank. The server's threads call it often.
        followers: takes peers that follow layers. Unset: none may.
        rows: what frozen layers made of samples, for peers that ask for it. Unset: there is none.
        log: receives a sentence about every refused peer, on the server's threads. Unset: this module's
            logger.

    Raises:
        OSError: `host` is not an address of this machine.
    """

    port: int

    def __init__(
        self,
        secret: bytes,
        host: str,
        *,
        busy: Callable[[], bool],
        log: Callable[[str], None] | None = None,
        flow: Flow | None = None,
        followers: Followers | None = None,
        rows: KeptRows | None = None,
    ) -> None:
        self._secret = secret
        self._busy = busy
        self._log = log or logging.getLogger(__name__).warning
        self._flow = flow or Flow()
        self._followers = followers
        self._rows = rows
        self._offers: dict[int, dict[tuple[Piece, StatePart], LayerState | MakeState]] = defaultdict(dict)
        self._kept: dict[int, dict[Piece, LayerState]] = defaultdict(dict)
        """The offers that `withdraw` leaves."""
        self._leaving: dict[WatchedSocket, StatePart] = {}
        """The deliveries of offers under way, each with the part of a layer that it sends."""
        self._offered = threading.Condition()
        self._closed = threading.Event()
        self._peers: dict[threading.Thread, WatchedSocket] = {}
        self._strangers: dict[threading.Thread, WatchedSocket] = {}
        """The peers that have not yet proved that they know the secret; oldest first."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MOST_PEERS + MOST_STRANGERS)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="state-server", daemon=True)
        self._thread.start()

    def offer(self, step: int, states: Iterable[LayerState], part: StatePart = StatePart.ALL) -> None:
        """Serve `states` as those of `step`, in addition to earlier offers.

        Args:
            states: of layers or shards; they do not change before `withdraw`.
            part: the part of each state that is offered.
        """
        with self._offered:
            self._offers[step].update({(Piece(state.layer, state.shard), part): state for state in states})
            self._offered.notify_all()

    def offer_to_make(self, step: int, states: Mapping[Piece, MakeState]) -> None:
        """Serve states as those of `step`, in addition to earlier offers. Each is made when it is asked for, on one of
        the server's threads, and every time."""
        with self._offered:
            self._offers[step].update({(piece, StatePart.ALL): make for piece, make in states.items()})
            self._offered.notify_all()

    def keep(self, step: int, states: Iterable[LayerState]) -> None:
        """Serve `states` as those of `step`, until `let_go`. They never change."""
        with self._offered:
            self._kept[step].update({Piece(state.layer, state.shard): state for state in states})
            self._offered.notify_all()

    def let_go(self, step: int) -> None:
        """Serve the states kept of `step` no more. Deliveries under way end as they would have."""
        with self._offered:
            self._kept.pop(step, None)

    def withdraw(self) -> None:
        """Withdraw all offers, but for those kept, and abort their deliveries. The offered states may change once this
        returns."""
        with self._offered:
            self._offers.clear()
            leaving = list(self._leaving)
        for line in leaving:
            line.cut()

    def close(self) -> None:
        """Abort all streams and end all threads; the port refuses connections from here on."""
        self._closed.set()
        if self._followers is not None:
            self._followers.close()
        with suppress(OSError):
            # Wakes the thread that waits in accept, which closing alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_S)
        self._listener.close()
        with self._offered:
            self._offered.notify_all()
            peers = dict(self._peers)
            self._offers.clear()
            self._kept.clear()
        for line in peers.values():
            line.cut()
        for thread in peers:
            thread.join(JOIN_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, address = self._listener.accept()
                line = WatchedSocket(connected, threading.Event(), HANDSHAKE_S)
            except OSError:
                # Closed; or the peer is gone, or no descriptors are left: later peers may still succeed.
                if self._closed.wait(0.05):
                    return
                continue
            peer = f"{address[0]}:{address[1]}"
            if len(self._peers) - len(self._strangers) >= MOST_PEERS:
                connected.close()
                self._log(f"state stream from {peer} refused: {MOST_PEERS} are open already")
                continue
            thread = threading.Thread(
                target=self._attend, args=(connected, line, peer), name="state-stream", daemon=True
            )
            with self._offered:
                if len(self._strangers) >= MOST_STRANGERS:
                    self._strangers.pop(next(iter(self._strangers))).cut()
                self._peers[thread] = self._strangers[thread] = line
            thread.start()

    def _attend(self, connected: socket.socket, line: WatchedSocket, peer: str) -> None:
        try:
            with connected:
                if self._flow.prioritized:
                    prioritize(connected)
                seal, opener = answer(line, self._secret)
                with self._offered:
                    self._strangers.pop(threading.current_thread(), None)
                kind, request, tag = read_frame(line, [FrameKind.REQUEST, FrameKind.FOLLOW, FrameKind.ROWS])
                opener.check(kind, 0, request, tag)
                line.silence_s = SILENCE_S
                if kind is FrameKind.FOLLOW:
                    self._lead(
                        Subscription.decode(request), Delivery(connected, line, seal, self._flow, self._busy)
                    )
                    return
                if kind is FrameKind.ROWS:
                    answer_rows(line, seal, RowsWish.decode(request), self._rows)
                    return
                wish = StateWish.decode(request)
                busy = self._busy if wish.part is not StatePart.MOMENTS else self._busy_with_weights
                delivery = Delivery(connected, line, seal, self._flow, busy)
                state = self._await(wish, delivery, line)
                if state is None:
                    delivery.decline(self._absence(wish))
                else:
                    self._deliver(delivery, wish, state)
        except (PeerGone, OSError):
            # A liveness probe connects and leaves; a peer that was cut off retries.
            pass
        except StreamRefused as error:
            self._log(f"state stream from {peer} refused: {error}")
        finally:
            with self._offered:
                self._leaving.pop(line, None)
                del self._peers[threading.current_thread()]
                self._strangers.pop(threading.current_thread(), None)

    def _deliver(self, delivery: Delivery, wish: StateWish, state: LayerState | MakeState) -> None:
        if not isinstance(state, LayerState):
            try:
                state = state()
            except Exception as error:
                delivery.decline(f"could not be made: {error}"[: MOST_BYTES[FrameKind.ABSENT] // 4])
                return
        if wish.fixed and state.leaves_out:
            delivery.decline("is here without its fixed parameters, as a snapshot")
            return
        delivery.deliver(part_of(state if wish.fixed else without_fixed(state), wish.part), wish.step)

    def _lead(self, subject: Subscription, delivery: Delivery) -> None:
        """Send layers and their changes to a peer until it is gone, or nothing more comes."""
        if self._followers is None:
            delivery.decline("nobody can follow this rank's layers")
            return
        follower = self._followers.open(subject)
        try:
            while True:
                match follower.next(self._flow.sign_of_life_s):
                    case States(step=step, states=states):
                        for state in states:
                            delivery.deliver(without_fixed(state), step)
                    case Parcels() as parcels:
                        delivery.deliver(parcels.as_state(), parcels.step)
                    case CommittedChange() as change:
                        delivery.change(change)
                    case None:
                        delivery.sign_of_life()
        except Over as over:
            delivery.decline(str(over))
        finally:
            self._followers.drop(follower)

    def _busy_with_weights(self) -> bool:
        """Moments are of no use without their weights, so they wait for all weights, other peers' too."""
        with self._offered:
            weights_leave = StatePart.WEIGHTS in self._leaving.values()
        return weights_leave or self._busy()

    def _await(
        self, wish: StateWish, delivery: Delivery, line: WatchedSocket
    ) -> LayerState | MakeState | None:
        """The state that `wish` names, once it is offered. `line` counts as a delivery from then on."""
        deadline = time.monotonic() + wish.wait_s
        while True:
            with self._offered:
                if self._closed.is_set():
                    raise PeerGone("this end was closed")
                kept = self._kept.get(wish.step, {}).get(wish.piece)
                offers = self._offers.get(wish.step, {})
                state = kept or offers.get((wish.piece, StatePart.ALL)) or offers.get((wish.piece, wish.part))
                left_s = deadline - time.monotonic()
                if state is not None and kept is None:
                    self._leaving[line] = wish.part
                if state is not None or left_s <= 0:
                    return state
                self._offered.wait(min(left_s, self._flow.sign_of_life_s))
            delivery.sign_of_life()

    def _absence(self, wish: StateWish) -> str:
        """Why the state is not available."""
        with self._offered:
            there = {step: [*states] for step, states in self._offers.items()}
            for step, states in self._kept.items():
                there[step] = [*there.get(step, ()), *((piece, StatePart.ALL) for piece in states)]
            offers = "; ".join(
                f"step {step}: {part} of layers {', '.join(layers)}"
                for step, states in sorted(there.items())
                for part in StatePart
                if (layers := [str(piece) for piece, offered in sorted(states) if offered is part])
            )
        return f"not offered within {wish.wait_s:g} s (there is {offers or 'nothing'})"[
            : MOST_BYTES[FrameKind.ABSENT] // 4
        ]
