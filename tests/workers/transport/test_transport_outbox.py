"""The memory of a message is freed once it has left, and a sender that is far ahead does not wait."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from pace import patient
from test_transport_process_group import ends
from torch import Tensor

from workers.transport.channel import MessageStream
from workers.transport.outbox import MOST, Outbox

THERE, BACK = MessageStream(0, 1, 2, "forward stage 0 -> 1"), MessageStream(1, 0, 3, "backward stage 1 -> 0")
MESSAGES = 40


class Work:
    """A send that leaves on command."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        assert self.left.wait(10)
        if self.error is not None:
            raise self.error


def eventually(what: object, condition: object) -> None:
    deadline = time.monotonic() + patient(60)
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Threads that other tests have left to end by themselves don't count in these tests."""
    BEFORE.update(threading.enumerate())
    yield
    BEFORE.clear()


BEFORE: set[threading.Thread] = set()


def has_thread() -> bool:
    return any(thread.name == "outbox" for thread in threading.enumerate() if thread not in BEFORE)


def filled() -> tuple[Outbox, list[Work], list["weakref.ref[torch.UntypedStorage]"]]:
    outbox, works, storages = Outbox(), [Work() for _ in range(10)], []
    for work in works:
        tensor = torch.zeros(8)
        storages.append(weakref.ref(tensor.untyped_storage()))
        outbox.put(work, tensor)
    return outbox, works, storages


def test_memory_is_freed_in_order_as_messages_leave() -> None:
    outbox, works, storages = filled()
    assert outbox.held == 10
    for number, work in enumerate(works[: 10 - MOST]):
        work.left.set()
        eventually("the message has left", lambda number=number: storages[number]() is None)
        assert all(storage() is not None for storage in storages[number + 1 :])
    for work in works:
        work.left.set()
    outbox.flush()
    assert outbox.held == 0
    assert all(storage() is None for storage in storages)
    outbox.close()
    eventually("the thread ends", lambda: not has_thread())


def test_an_error_comes_out_of_the_flush() -> None:
    outbox, works, _ = filled()
    works[1].error = RuntimeError("connection closed by peer")
    for work in works:
        work.left.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        outbox.flush()
    assert outbox.held == 0
    # A second flush does not wait either.
    outbox.put(works[0], torch.zeros(1))
    with pytest.raises(RuntimeError, match="closed by peer"):
        outbox.flush()
    outbox.close()


def test_a_few_messages_need_no_thread_before_the_flush() -> None:
    outbox, work = Outbox(), Work()
    work.left.set()
    for _ in range(MOST):
        outbox.put(work, torch.zeros(1))
    assert not has_thread()
    outbox.flush()
    outbox.close()
    eventually("the thread ends", lambda: not has_thread())


def test_a_flush_is_woken_by_closing_though_nothing_leaves() -> None:
    outbox, works, storages = filled()
    threading.Timer(0.2, outbox.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        outbox.flush()
    assert outbox.held == 0
    for work in works:
        work.left.set()
    eventually("what was sent is let go", lambda: all(storage() is None for storage in storages))
    eventually("the thread ends", lambda: not has_thread())


def test_a_flush_is_woken_where_what_is_lost_does_not_say_so() -> None:
    lost = threading.Event()
    outbox, work = Outbox(lost.is_set), Work()
    outbox.put(work, torch.zeros(1))
    threading.Timer(0.2, lost.set).start()
    with pytest.raises(RuntimeError, match="broken"):
        outbox.flush()
    work.left.set()
    outbox.close()
    eventually("the thread ends", lambda: not has_thread())


def message(number: int) -> Tensor:
    return torch.full((20_000,), float(number))


def test_a_receiver_that_keeps_up_frees_its_senders_memory() -> None:
    with ends(2) as (sender, receiver):
        sender.send(THERE, (message(0),))
        receiver.receive(THERE)
        receiver.expect(THERE, MESSAGES)
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        for number in range(MESSAGES):
            tensor = message(number)
            alive.append(weakref.ref(tensor.untyped_storage()))
            sender.send(THERE, (tensor,))
            del tensor
            (got,) = receiver.receive(THERE)
            assert torch.equal(got, message(number))
        gc.collect()
        eventually("sent memory is freed", lambda: sum(one() is not None for one in alive) <= MOST)
        sender.flush()
        assert all(one() is None for one in alive)


def test_a_sender_far_ahead_of_its_receiver_does_not_wait() -> None:
    with ends(2) as (sender, receiver):
        sender.send(THERE, (message(0),))
        receiver.receive(THERE)
        # The receiver posts nothing until the sender has sent everything, so a sender that waited for the
        # first message would wait for ever.
        for number in range(MESSAGES):
            sender.send(THERE, (message(number),))
        receiver.send(BACK, (message(7),))
        (back,) = sender.receive(BACK)
        assert torch.equal(back, message(7))
        for number in range(MESSAGES):
            (got,) = receiver.receive(THERE)
            assert torch.equal(got, message(number))
        sender.flush()
        receiver.flush()
        assert has_thread()
    eventually("the threads end", lambda: not has_thread())
