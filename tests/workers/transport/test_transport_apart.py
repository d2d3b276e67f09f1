"""Large messages that are sent apart keep no memory once they have left, and those of one order share a thread."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from test_transport_outbox import eventually, message
from test_transport_process_group import ends, woken

from workers.transport.channel import MessageStream

SMALL = MessageStream(0, 1, 2, "forward stage 0 -> 1")
LARGE = tuple(MessageStream(0, 1, 3 + number, f"gradients {number}") for number in range(3))


def test_what_is_sent_apart_is_freed_and_waited_for_apart() -> None:
    with ends(2) as (sender, receiver):
        for stream in (SMALL, *LARGE):
            sender.send(stream, (message(0),))
            receiver.receive(stream)
        sender.send(SMALL, (message(1),))
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        for number, stream in enumerate(LARGE):
            tensor = message(number)
            alive.append(weakref.ref(tensor.untyped_storage()))
            sender.send_apart(stream, (tensor,))
            receiver.expect_next(stream)
            del tensor
        # The small one is not asked for yet.
        sender.flush_apart()
        eventually("nothing is kept", lambda: all(storage() is None for storage in alive))
        assert all(torch.equal(receiver.receive(s)[0], message(n)) for n, s in enumerate(LARGE))
        tensor = message(5)
        sender.send_apart(LARGE[0], (tensor,))
        assert torch.equal(receiver.receive(SMALL)[0], message(1))
        sender.flush()  # and not for the large one, which nobody takes in yet
        assert torch.equal(receiver.receive(LARGE[0])[0], message(5))
        sender.flush_apart()


@pytest.mark.parametrize("leaver", [0, 1])
def test_whoever_waits_for_them_to_leave_is_woken(leaver: int) -> None:
    with ends(2) as channels:
        channels[0].send(LARGE[0], (message(0),))
        channels[1].receive(LARGE[0])
        channels[0].send_apart(LARGE[0], (message(1),))
        said = woken(channels[0].flush_apart, channels[leaver])
        assert "could not be delivered" in said


def test_messages_that_come_in_one_order_share_a_thread() -> None:
    before = set(threading.enumerate())

    def waiting() -> int:
        return sum(each.name.startswith("receive gradients") for each in set(threading.enumerate()) - before)

    with ends(2) as (sender, receiver):
        for stream in LARGE:
            sender.send(stream, (message(0),))
            receiver.receive(stream)
        for turn in range(3):
            for stream in LARGE:
                receiver.expect_next(stream)
            for number, stream in enumerate(LARGE):
                sender.send_apart(stream, (message(10 * turn + number),))
            for number, stream in enumerate(LARGE):
                assert torch.equal(receiver.receive(stream)[0], message(10 * turn + number))
            assert waiting() == 1
            receiver.renew()
            sender.flush_apart()
            sender.renew()
            for stream in LARGE:
                sender.send_apart(stream, (message(0),))
                receiver.receive(stream)
            sender.flush_apart()
