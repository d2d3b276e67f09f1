"""Ranks whose groups run strictly one by one: the same bits, no deadlock, errors that name the edge."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import FAMILIES, job, small_config
from serial_backend import blocking_channel, serial_channel
from test_engine_bits import losses, real_config
from torch import Tensor, nn

from benchmarks.parts.rank_threads import run_threads
from planner.shares import ReplicaPart
from workers.gradients.exchange import ReplicaExchange, TiedUse, TieExchange
from workers.launch.ranks import LaunchedRun, run_processes
from workers.protocol.errors import ChannelError, JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import SampleReport, ValidationReport
from workers.state.flat import GradientBuffers
from workers.transport.channel import MessageStream
from workers.transport.ordered import OrderedChannel, RawMessage

FORWARD = MessageStream(0, 1, 2, "forward stage 0 -> 1")
BACKWARD = MessageStream(1, 0, 1, "backward stage 1 -> 0")
ASIDE = MessageStream(0, 1, 9, "gradients")


@pytest.mark.each_choice
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_bits_of_one_rank(tmp_path: Path, family: str, ranks: int) -> None:
    config = small_config(tmp_path, "two-outputs", steps=3, validate_every=2)
    expected = run_threads(job(config))
    run = run_processes(job(config, ranks=ranks, schedule=family, open_channel=serial_channel))
    assert run.state_sha256 == expected.state_sha256
    assert losses(run) == losses(expected)
    assert of_kind(run, ValidationReport) == of_kind(expected, ValidationReport)


@pytest.mark.parametrize("family", ["interleaved", "zbv"])
def test_ranks_that_stand_still_while_a_group_waits_do_not_deadlock(tmp_path: Path, family: str) -> None:
    config = small_config(tmp_path, steps=3, validate_every=2)
    run = run_processes(job(config, ranks=4, schedule=family, open_channel=blocking_channel))
    assert run.state_sha256 == run_threads(job(config)).state_sha256


@pytest.mark.parametrize("trait", ["tied", "batchnorm"])
def test_replicas_ties_and_buffers_have_the_same_bits(tmp_path: Path, trait: str) -> None:
    config = small_config(tmp_path, trait, steps=3, microbatches=2, replicas=2)
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    run = run_processes(job(config, ranks=2, schedule="zbv", recompute=True, open_channel=serial_channel))
    assert run.state_sha256 == expected.state_sha256
    assert losses(run) == losses(expected)


def test_shared_states_have_the_same_bits(tmp_path: Path) -> None:
    config = small_config(tmp_path, "tied", steps=3, microbatches=2, replicas=2)
    expected = run_threads(job(config, ranks=2, schedule="1f1b"))
    work = job(config, ranks=2, schedule="1f1b", open_channel=blocking_channel)
    run = run_processes(replace(work, plan=replace(work.plan, shard="optimizer")))
    assert run.state_sha256 == expected.state_sha256


def test_windows_of_other_shapes_and_sampling(tmp_path: Path) -> None:
    config = real_config(tmp_path, "gpt", steps=3, validate_every=2, sample_tokens=4)
    expected = run_threads(job(config))
    run = run_processes(job(config, ranks=2, schedule="interleaved", open_channel=blocking_channel))
    assert run.state_sha256 == expected.state_sha256
    for kind in (ValidationReport, SampleReport):
        assert of_kind(run, kind) == of_kind(expected, kind) != []


def of_kind(run: LaunchedRun, kind: type) -> list[object]:
    return [report for report in run.reports if isinstance(report, kind)]


@contextmanager
def pair() -> Iterator[tuple[OrderedChannel, OrderedChannel]]:
    """Both ends of a channel between two ranks in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = Generation(
        number=1, epoch=1, members=(0, 1), store_host="127.0.0.1", store_port=store.port, timeout_s=30.0
    )
    ends: dict[int, OrderedChannel] = {}
    threads = [
        threading.Thread(target=lambda r=rank: ends.update({r: serial_channel(generation, r)}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends.values():
            end.close()


def test_messages_arrive_whole_and_marked_and_other_streams_pass_by() -> None:
    with pair() as (first, second):
        for end in (first, second):
            end.window([[FORWARD], [FORWARD, BACKWARD]])
        sent = [
            (torch.randn(3, 2).requires_grad_(), torch.tensor([True, False]), torch.empty(0, 4)),
            (torch.randn(3, 2).requires_grad_(), torch.tensor([False, False]), torch.empty(0, 4)),
        ]
        first.send(ASIDE, (torch.tensor(7),))
        for tensors in sent:
            first.send(FORWARD, tensors)
        received = [second.receive(FORWARD)]
        second.send(BACKWARD, (torch.tensor(2.5),))
        assert first.receive(BACKWARD)[0].item() == 2.5
        received.append(second.receive(FORWARD))
        for got, tensors in zip(received, sent, strict=True):
            assert all(a.equal(b) for a, b in zip(got, tensors, strict=True))
            assert [t.requires_grad for t in got] == [True, False, False]
        assert second.receive(ASIDE)[0].item() == 7
        first.flush()
        second.flush()


def test_an_image_arrives_with_its_channels_last() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with pair() as (first, second):
        for end in (first, second):
            end.window([[FORWARD]])
        for stream in (FORWARD, ASIDE):
            first.send(stream, (image,))
            (got,) = second.receive(stream)
            assert got.equal(image)
            assert got.stride() == image.stride()
        first.flush()
        second.flush()


def test_a_message_of_another_shape_is_refused() -> None:
    with pair() as (first, _):
        first.window([[FORWARD], [FORWARD]])
        first.send(FORWARD, (torch.zeros(2, 3),))
        with pytest.raises(
            JobError, match=r"forward stage 0 -> 1 \(rank 0 -> 1\) carries float32 \[2, 3\], but"
        ):
            first.send(FORWARD, (torch.zeros(1, 3),))


@pytest.mark.parametrize("known", [False, True], ids=["first message", "later message"])
def test_a_neighbour_that_leaves_is_noticed_at_once(known: bool) -> None:
    with pair() as (first, second):
        for end in (first, second):
            end.window([[FORWARD], [FORWARD]])
        if known:
            first.send(FORWARD, (torch.zeros(2),))
            second.receive(FORWARD)
        leaving = threading.Timer(0.05, first.close)
        leaving.start()
        with pytest.raises(ChannelError, match="forward stage 0 -> 1"):
            second.receive(FORWARD)
        leaving.join()


def test_a_rank_that_is_told_to_leave_stops_waiting() -> None:
    with pair() as (first, second):
        for end in (first, second):
            end.window([[FORWARD], [FORWARD]])
        first.send(FORWARD, (torch.zeros(2),))
        second.receive(FORWARD)
        leaving = threading.Timer(0.05, second.close)
        leaving.start()
        with pytest.raises(ChannelError, match="forward stage 0 -> 1"):
            second.receive(FORWARD)
        leaving.join()


@contextmanager
def counted(channel: OrderedChannel) -> Iterator[list[int]]:
    """The sizes of the messages that leave over the ordered network."""
    backend, sizes = channel._backend, list[int]()
    issue = backend.issue

    def counting(sends: Sequence[RawMessage], receives: Sequence[RawMessage]) -> object:
        sizes.extend(len(raw) for raw, _ in sends)
        return issue(sends, receives)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "issue", counting)
        yield sizes


def on_both(work: Callable[[OrderedChannel], None], ends: tuple[OrderedChannel, OrderedChannel]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, ends))


def test_gradients_of_replicas_travel_over_the_ordered_network_and_few_layers_at_a_time() -> None:
    sums: dict[int, list[Tensor]] = {}

    def exchange(channel: OrderedChannel) -> None:
        parameters = [
            nn.Parameter(torch.full((64 * (layer + 1),), 1.0 + channel.rank)) for layer in range(12)
        ]
        summed = {layer: GradientBuffers({"w": p}) for layer, p in enumerate(parameters)}
        replicas = ReplicaExchange(
            channel, (0, 1), summed, 3, [ReplicaPart(0, 0, 1, 0), ReplicaPart(1, 0, 1, 1)]
        )
        for _ in range(2):
            for p in parameters:
                p.grad = p.detach().clone()
            (part,) = replicas.own_parts
            replicas.sum({part: {layer: each.taken() for layer, each in summed.items()}})
        sums[channel.rank] = [p.grad for p in parameters if p.grad is not None]

    with pair() as ends, counted(ends[0]) as sizes:
        on_both(exchange, ends)
    for found in (sums[0], sums[1]):
        assert [(set(total.tolist()), len(total)) for total in found] == [
            ({3.0}, 64 * (layer + 1)) for layer in range(12)
        ]
    lengths = [sizes[n : n + len(sizes) // 2] for n in (0, len(sizes) // 2)]
    assert lengths[0] == lengths[1]
    # Of each layer a half to the sibling, and the sum of the other half.
    assert sum(lengths[0]) == sum(4 * 64 * (layer + 1) for layer in range(12))


def test_gradients_of_tied_parameters_travel_over_the_ordered_network() -> None:
    sums: dict[int, Tensor | None] = {}

    def exchange(channel: OrderedChannel) -> None:
        use = TiedUse(layer=channel.rank, name="w", rank=channel.rank)
        parameter = nn.Parameter(torch.zeros(500))
        parameter.grad = torch.full((500,), 1.0 + channel.rank)
        ties = [[TiedUse(layer=rank, name="w", rank=rank) for rank in (0, 1)]]
        TieExchange(channel, ties, {(use.layer, "w"): parameter}, base=0, tags=3).sum()
        sums[channel.rank] = parameter.grad

    with pair() as ends, counted(ends[0]) as sizes:
        on_both(exchange, ends)
    assert sizes == [1, 2000]
    for total in (sums[0], sums[1]):
        assert total is not None
        assert total.eq(3.0).all()
