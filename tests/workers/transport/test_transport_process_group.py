"""Leaving a Gloo group wakes ranks that wait in it at once, long before any timeout."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from pace import patient

from workers.protocol.errors import ChannelError, JobError
from workers.protocol.orders import Generation
from workers.transport.channel import Channel, MessageStream
from workers.transport.process_group import ProcessGroupChannel

STREAM = MessageStream(0, 1, 2, "forward stage 0 -> 1")
TIMEOUT_S = patient(20.0)


def generation_of(ranks: int, store: dist.TCPStore, timeout_s: float) -> Generation:
    return Generation(
        number=1,
        epoch=1,
        members=tuple(range(ranks)),
        store_host="127.0.0.1",
        store_port=store.port,
        timeout_s=timeout_s,
    )


@contextmanager
def ends(ranks: int) -> Iterator[list[Channel]]:
    """The channels of `ranks` ranks in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = generation_of(ranks, store, TIMEOUT_S)
    opened: dict[int, Channel] = {}

    def open_end(rank: int) -> None:
        opened[rank] = ProcessGroupChannel(generation, rank, torch.device("cpu"))

    threads = [threading.Thread(target=open_end, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield [opened[rank] for rank in range(ranks)]
    finally:
        for end in opened.values():
            end.close()


def woken(waiting: Callable[[], object], leaver: Channel) -> str:
    """The error with which `waiting` ends when `leaver` closes; it must not be a timeout."""
    leaving = threading.Timer(0.05, leaver.close)
    leaving.start()
    with pytest.raises(ChannelError) as caught:
        waiting()
    leaving.join()
    assert f"{TIMEOUT_S * 1000:.0f}ms" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("known", [False, True], ids=["first message", "later message"])
def test_a_receive_is_woken(leaver: int, known: bool) -> None:
    with ends(3) as channels:
        if known:
            channels[0].send(STREAM, (torch.zeros(2),))
            channels[1].receive(STREAM)
        assert STREAM.name in woken(lambda: channels[1].receive(STREAM), channels[leaver])


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_commit_is_woken(leaver: int) -> None:
    with ends(3) as channels:
        assert "commit" in woken(lambda: channels[1].all_gather(b"record"), channels[leaver])


def test_a_flush_is_woken() -> None:
    with ends(2) as channels:
        channels[0].send(STREAM, (torch.zeros(2),))
        assert "could not be delivered" in woken(channels[0].flush, channels[1])


def test_leaving_reaches_the_survivors_of_another_loss() -> None:
    with ends(3) as channels:
        channels[2].close()
        woken(lambda: channels[0].all_gather(b"record"), channels[2])
        woken(lambda: channels[1].receive(STREAM), channels[0])


def test_leaving_twice_and_alone_is_nothing() -> None:
    with ends(2) as channels:
        channels[0].close()
        channels[0].close()
    with ends(1) as (alone,):
        assert alone.all_gather(b"record") == [b"record"]
        alone.close()
        for _ in range(2):
            with pytest.raises(ChannelError, match="closed"):
                alone.all_gather(b"record")


def test_a_channel_without_connections_holds_nothing_up() -> None:
    with ends(1) as (alone,):
        assert [alone.pace(1e6), alone.pace(1e6)] == [False, False]
    with ends(2) as channels:
        assert [channels[0].pace(rate) for rate in (1e6, 1e6, None)] == [True, True, True]


def test_a_rank_that_cannot_measure_its_links_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*given: object) -> None:
        raise dist.DistNetworkError("the store is gone")

    monkeypatch.setattr("workers.transport.process_group.Peers", gone)
    with ends(2) as channels:
        channels[0].watch_links()
        channels[0].send(STREAM, (torch.ones(2),))
        assert channels[1].receive(STREAM)[0].tolist() == [1.0, 1.0]
        assert channels[0].link_times() == ()


def test_what_is_begun_after_a_peer_has_gone_is_an_error_of_the_channel() -> None:
    back = MessageStream(1, 0, 3, "backward stage 1 -> 0")
    with ends(2) as channels:
        channels[1].send(back, (torch.zeros(2),))
        channels[0].receive(back)
        woken(lambda: channels[0].receive(back), channels[1])
        with pytest.raises(ChannelError, match=STREAM.name):
            channels[0].send(STREAM, (torch.zeros(2),))
        with pytest.raises(ChannelError, match=back.name):
            channels[0].receive(back)
        with pytest.raises(ChannelError, match="tied"):
            channels[0].receive(MessageStream(1, 0, 9, "tied gradient"))


def test_a_tensor_that_is_sent_twice_arrives_as_one_where_it_carries_a_gradient() -> None:
    with ends(2) as channels:
        for value in (1.0, 2.0):
            once, fixed = torch.full((3,), value).requires_grad_(), torch.full((2,), -value)
            channels[0].send(STREAM, (once, fixed, once, fixed))
            one, other, again, beside = channels[1].receive(STREAM)
            assert one is again
            assert other is not beside
            assert torch.equal(one, once)
            assert torch.equal(other, fixed)
            assert torch.equal(beside, fixed)
        apart = (once, fixed, once.detach().clone().requires_grad_(), fixed)
        with pytest.raises(JobError, match="every microbatch must have the same shape"):
            channels[0].send(STREAM, apart)
