"""Layer states arrive over a state stream with all their bits; a fetch waits, or says why nothing comes."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest
import torch
from state_streams import FLOWS, HOST, LIVELY, SECRET, bits, eventually, fetching, rich_state, serving
from torch import Tensor

from workers.protocol.orders import StatePart
from workers.state.layer_state import LayerState, part_of, united
from workers.state_stream.flow import Flow
from workers.state_stream.frames import Absent, PeerGone
from workers.state_stream.stream import fetch


@pytest.mark.parametrize("flow", FLOWS)
def test_every_bit_arrives(flow: Flow) -> None:
    with serving(flow=flow) as to:
        to.server.offer(17, [rich_state()])
        got = to.fetch(flow=flow)
        assert bits(got) == bits(rich_state())
        everything = [*got.weights.values(), *got.buffers.values(), *got.freezing.values()]
        everything += [t for slots in got.slots.values() for t in slots.values()]
        assert all(t.is_contiguous() and not t.requires_grad for t in everything)
        assert all(t.storage_offset() == 0 for t in everything), "each has an allocation of its own"
        assert len({t.untyped_storage().data_ptr() for t in everything if t.numel()}) == sum(
            t.numel() > 0 for t in everything
        )
        assert to.log == []


@pytest.mark.parametrize("chunk_bytes", [1, 999, 128 * 1024])
def test_chunks_may_have_any_size(chunk_bytes: int) -> None:
    state = LayerState(0, "one", {"w": torch.randn(300)}, {}, {"w": {"m": torch.randn(300)}}, {"w": 1})
    with serving(flow=Flow(chunk_bytes=chunk_bytes)) as to:
        to.server.offer(17, [state])
        assert bits(to.fetch(0)) == bits(state)


def test_a_layer_without_tensors_is_a_state_too() -> None:
    state = LayerState(0, "relu", {}, {}, {}, {})
    with serving() as to:
        to.server.offer(17, [state])
        assert bits(to.fetch(0)) == bits(state)


def test_live_parameters_can_be_offered() -> None:
    state = LayerState.of(0, "linear", torch.nn.Linear(3, 4), _NoSlots())
    with serving() as to:
        to.server.offer(17, [state])
        got = to.fetch(0)
        assert torch.equal(got.weights["weight"], state.weights["weight"])
        assert type(got.weights["weight"]) is Tensor


class _NoSlots:
    def slot_names(self) -> tuple[str, ...]:
        return ()


def test_several_steps_and_several_at_a_time() -> None:
    with serving() as to:
        states = {
            (step, layer): rich_state(layer, 10 * step + layer) for step in (1, 2) for layer in range(3)
        }
        for (step, _), state in states.items():
            to.server.offer(step, [state])
        got: dict[tuple[int, int], LayerState] = {}
        threads = [
            threading.Thread(target=lambda key=key: got.update({key: to.fetch(key[1], key[0])}))
            for key in states
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {key: bits(state) for key, state in got.items()} == {k: bits(s) for k, s in states.items()}
        with pytest.raises(
            Absent, match=r"layer 0 of step 3 .* not offered within 0 s .*step 2: all of layers 0, 1, 2"
        ):
            to.fetch(0, 3, wait_s=0)
        assert bits(to.fetch(0, 2)) == bits(states[2, 0])
        to.server.withdraw()
        with pytest.raises(Absent, match="there is nothing"):
            to.fetch(0, 2, wait_s=0)


def test_a_fetch_waits_until_it_is_offered() -> None:
    with serving() as to, fetching(to.fetch) as got:
        eventually("the request is there", lambda: bool(to.server._peers))
        to.server.offer(17, [rich_state(2)])
        to.server.offer(16, [rich_state()])
        assert got == []
        to.server.offer(17, [rich_state()])
        eventually("it has come", lambda: bool(got))
    assert isinstance(got[0], LayerState)
    assert bits(got[0]) == bits(rich_state())


def test_a_dtype_that_cannot_travel_is_named() -> None:
    with serving() as to:
        state = LayerState(0, "odd", {"w": torch.empty(3, dtype=torch.float8_e5m2)}, {}, {}, {"w": 0})
        to.server.offer(17, [state])
        with pytest.raises(Absent, match="w has dtype float8_e5m2"):
            to.fetch(0)


def test_a_part_of_a_state_comes_alone_and_both_make_it_up() -> None:
    with serving() as to:
        to.server.offer(17, [rich_state()])
        weights, moments = to.fetch(part=StatePart.WEIGHTS), to.fetch(part=StatePart.MOMENTS)
        assert bits(weights) == bits(part_of(rich_state(), StatePart.WEIGHTS))
        assert bits(moments) == bits(part_of(rich_state(), StatePart.MOMENTS))
        assert [weights.slots, weights.updates, weights.freezing] == [{}] * 3
        assert [moments.weights, moments.buffers] == [{}] * 2
        assert bits(united(weights, moments)) == bits(rich_state())


def test_who_has_only_weights_gives_no_more() -> None:
    with serving() as to:
        to.server.offer(17, [part_of(rich_state(), StatePart.WEIGHTS)], StatePart.WEIGHTS)
        assert bits(to.fetch(part=StatePart.WEIGHTS)) == bits(part_of(rich_state(), StatePart.WEIGHTS))
        for part in (StatePart.ALL, StatePart.MOMENTS):
            with pytest.raises(Absent, match=r"\(there is step 17: weights of layers 3\)"):
                to.fetch(part=part, wait_s=0)


def test_moments_wait_for_the_weights_that_others_fetch() -> None:
    """One fetch of weights is held up half-way, and moments come only after it."""
    held, let = threading.Event(), threading.Event()

    def busy() -> bool:
        if held.is_set():
            return not let.is_set()
        held.set()
        return True

    with serving(busy, flow=LIVELY) as to:
        to.server.offer(17, [rich_state(), rich_state(4)])
        with fetching(lambda: to.fetch(part=StatePart.WEIGHTS)) as weights:
            eventually("the weights are held up", held.is_set)
            with fetching(lambda: to.fetch(4, part=StatePart.MOMENTS)) as moments:
                eventually("both are there", lambda: len(to.server._peers) == 2)
                assert to.server._busy_with_weights()
                assert (weights, moments) == ([], [])
                let.set()
    assert isinstance(weights[0], LayerState)
    assert isinstance(moments[0], LayerState)
    assert not to.server._busy_with_weights()


def test_a_withdrawn_state_may_change_at_once() -> None:
    """A delivery that training holds up half-way is aborted: nothing of the changed state may arrive."""
    held, let = threading.Event(), threading.Event()

    def busy() -> bool:
        if to.server._leaving:
            held.set()
            return not let.is_set()
        return False

    state = rich_state()
    with serving(busy, flow=LIVELY) as to:
        to.server.offer(17, [state])
        with fetching(to.fetch) as got:
            eventually("the delivery is held up", held.is_set)
            to.server.withdraw()
            for weight in state.weights.values():
                weight.zero_()
            eventually("the fetch has ended, though training still sends", lambda: bool(got))
            let.set()
        assert isinstance(got[0], PeerGone)
        to.server.offer(18, [state])
        assert bits(to.fetch(step=18)) == bits(state)


def test_closing_the_server_ends_every_fetch() -> None:
    with serving(busy=lambda: True) as to:
        to.server.offer(17, [rich_state()])
        with fetching(to.fetch) as gated, fetching(lambda: to.fetch(4, wait_s=100)) as waiting:
            eventually("both are there", lambda: len(to.server._peers) == 2)
            to.server.close()
    assert isinstance(gated[0], PeerGone)
    assert isinstance(waiting[0], PeerGone)
    assert "layer 4 of step 17" in str(waiting[0])


def test_a_fetch_can_be_given_up() -> None:
    stopped = threading.Event()
    with serving(flow=LIVELY) as to, fetching(lambda: to.fetch(wait_s=100, stopped=stopped)) as got:
        eventually("the request is there", lambda: bool(to.server._peers))
        stopped.set()
        eventually("it has given up", lambda: bool(got))
        assert isinstance(got[0], PeerGone)
        eventually("the server has noticed", lambda: not to.server._peers)
        assert to.log == []


def test_nobody_listens() -> None:
    with closing(socket.create_server((HOST, 0))) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        PeerGone, match=f"layer 3 of step 17 from {HOST}:{port}: cannot connect: Connection refused"
    ):
        fetch(HOST, port, SECRET, 3, 17, wait_s=1)
