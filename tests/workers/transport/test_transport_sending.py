"""A rank's own kernel says whether training still sends, without counting what has left or not begun."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pace import patient
from test_transport_process_group import STREAM, ends

from benchmarks.parts.rank_threads import Hub, LocalChannel
from workers.state_stream.sending import prioritize
from workers.transport.channel import Channel
from workers.transport.connections import PolledConnections, UnpolledConnections
from workers.transport.ordered import OrderedChannel, RawMessage
from workers.transport.process_group import ProcessGroupChannel
from workers.transport.send_queues import ACKNOWLEDGEMENT_S, SendQueues

BIG = 30_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        near = socket.create_connection(listener.getsockname(), 5)
        far, _ = listener.accept()
    with near, far:
        yield near, far


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(60)
    while not condition():
        assert time.monotonic() < deadline, what


def clog(near: socket.socket) -> int:
    """Write until the socket is full; returns the bytes written."""
    near.setblocking(False)
    written = 0
    while True:
        try:
            written += near.send(bytes(1 << 20))
        except BlockingIOError:
            return written


def drain(far: socket.socket, count: int) -> None:
    while count:
        count -= len(far.recv(1 << 20))


def test_bytes_are_pending_until_they_have_left() -> None:
    queues = SendQueues(UnpolledConnections())
    with connection() as (near, far):
        queues.find_new()
        assert not queues.pending()
        written = clog(near)
        assert all(queues.pending() for _ in range(3))
        time.sleep(2 * ACKNOWLEDGEMENT_S)
        assert queues.pending(), "what is unsent stays pending however long nothing moves"
        drain(far, written)
        eventually("all has left", lambda: not queues.pending())


def test_a_late_acknowledgement_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything has been sent, but the other end is slow to acknowledge it."""
    answers = {0x5411: 48, 0x894B: 0}
    monkeypatch.setattr("workers.transport.send_queues._ask", lambda _, what: answers[what])
    clock = Clock()
    queues = SendQueues(UnpolledConnections(), clock=clock)
    with connection():
        queues.find_new()
        assert queues.pending()
        clock.now_s += ACKNOWLEDGEMENT_S / 2
        assert queues.pending()
        answers[0x5411] = 20
        clock.now_s += ACKNOWLEDGEMENT_S / 2
        assert queues.pending(), "it still moves"
        clock.now_s += 2 * ACKNOWLEDGEMENT_S
        assert not queues.pending()
        answers[0x5411] = 21
        assert queues.pending(), "more was sent"


def test_other_connections_do_not_count() -> None:
    with connection() as (old, _):
        queues = SendQueues(UnpolledConnections())
        with connection() as (tagged, _):
            prioritize(tagged)
            queues.find_new()
            with connection() as (later, _):
                for other in (old, tagged, later):
                    clog(other)
                assert not queues.pending()


def test_what_a_poller_of_others_watches_does_not_count() -> None:
    queues = SendQueues(UnpolledConnections())
    with connection() as (near, _), select.epoll() as others:
        others.register(near)
        queues.find_new()
        assert queues.open == 1, "the far end"


def test_of_a_polling_library_only_that_which_it_watches_beside_its_listener_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as old, select.epoll() as before, connection() as (older, _):
        before.register(old)
        before.register(older)
        queues = SendQueues(PolledConnections())
        with connection() as (other, _), connection() as (near, _), select.epoll() as poller:
            before.register(other)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                poller.register(listener)
                poller.register(near)
                queues.find_new()
                assert queues.open == 1
                clog(other)
                assert not queues.pending()
                clog(near)
                assert queues.pending()
        assert queues.open == 0


def test_a_group_counts_none_but_its_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign connection that opens while the group forms would hide the loss of one of the group's own."""
    form = dist.ProcessGroupGloo
    with ExitStack() as stack:

        def form_beside_others(*given: Any) -> Any:
            stack.enter_context(connection())
            return form(*given)

        monkeypatch.setattr(dist, "ProcessGroupGloo", form_beside_others)
        with ends(2) as channels:
            for channel in channels:
                assert isinstance(channel, ProcessGroupChannel)
                # Both ends are in this process, and each may see the other's connection.
                assert channel._queues.open in (1, 2)


def test_later_connections_count_where_the_library_opens_them_as_it_goes() -> None:
    clock = Clock()
    queues = SendQueues(UnpolledConnections(), growing=True, clock=clock)
    assert not queues.pending()
    with connection() as (near, _):
        clog(near)
        clock.now_s += 1
        assert queues.pending()


def test_a_closed_connection_is_not_pending_even_if_its_descriptor_is_used_again() -> None:
    queues = SendQueues(UnpolledConnections())
    with connection() as (near, far):
        queues.find_new()
        descriptors = {near.fileno(), far.fileno()}
        clog(near)
        assert queues.pending()
    assert not queues.pending()
    with connection() as (near, far):
        assert {near.fileno(), far.fileno()} & descriptors, "the system gives out the lowest free descriptor"
        clog(near)
        assert not queues.pending()


def sends_big(sender: Channel, receiver: Channel) -> bool:
    """Whether `sender` reports that it sends while a big message leaves."""
    sender.send(STREAM, (torch.zeros(BIG // 4),))
    receiver.receive(STREAM)
    eventually("all has left", lambda: not sender.sending())
    # This thread may sleep while an entire message passes, so it sends several.
    for _ in range(5):
        sender.send(STREAM, (torch.ones(BIG // 4),))
        eventually("nothing moves before the receiver is ready", lambda: not sender.sending())
        receiver.expect(STREAM, 1)
        seen = any(sender.sending() for _ in range(100_000))
        (second,) = receiver.receive(STREAM)
        assert second[0] == 1
        sender.flush()
        eventually("all has left", lambda: not sender.sending())
        if seen:
            return True
    return False


def test_a_gloo_channel_sends_while_its_message_is_on_the_way() -> None:
    with ends(2) as (sender, receiver):
        assert sends_big(sender, receiver)
        sender.close()
        assert not sender.sending()


class Network:
    """A network that never moves anything and reports `sends`."""

    device = torch.device("cpu")

    def __init__(self, sends: bool) -> None:
        self.sends = sends

    def issue(self, sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> None:
        pass

    def wait(self, handle: object) -> None:
        pass

    def finish(self, handle: object) -> None:
        pass

    def sending(self) -> bool:
        return self.sends

    def close(self) -> None:
        pass


@pytest.mark.parametrize("sends", [False, True])
def test_an_ordered_channel_asks_its_network_too(sends: bool) -> None:
    assert OrderedChannel(LocalChannel(Hub(2), 0), Network(sends)).sending() == sends


def test_an_ordered_channel_asks_its_control_channel_too() -> None:
    with ends(2) as (sender, receiver):
        channel = OrderedChannel(sender, Network(False))
        assert sends_big(channel, receiver)


def test_threads_of_one_process_send_nothing() -> None:
    channel = LocalChannel(Hub(2), 0)
    channel.send(STREAM, (torch.zeros(4),))
    assert not channel.sending()
