"""A peer outside the group follows layers over a state stream."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from state_streams import (
    HOST,
    LIVELY,
    SECRET,
    Server,
    between,
    bits,
    eventually,
    fetching,
    rich_state,
    serving,
)

from workers.state.layer_state import LayerState
from workers.state_stream import frames
from workers.state_stream.follow import FollowedOwner, follow
from workers.state_stream.following import CommittedChange, Followers, Parcels, Subscription
from workers.state_stream.frames import Absent, PeerGone, StreamRefused

GENERATION = 1
LAYER = 3
MARK = b"ZZZZ"
"""In every parcel, and in no state."""


class Leading:
    """A server whose layer others follow, and what commits do there."""

    def __init__(self, followers: Followers, to: Server) -> None:
        self.followers = followers
        self.to = to
        self.signs = 0
        """Signs of life that its peer got."""

    def _count(self) -> None:
        self.signs += 1

    @contextmanager
    def followed(self, port: int | None = None) -> Iterator[FollowedOwner]:
        """A peer that has just begun to follow."""
        subject = Subscription(layers=(LAYER,), generation=GENERATION)
        with follow(
            HOST,
            port or self.to.server.port,
            SECRET,
            subject,
            waited=self._count,
            stopped=threading.Event(),
        ) as following:
            eventually("it is known", lambda: len(self.followers._ours()) == 1)
            yield following

    def send(self, step: int) -> Parcels:
        parcel = torch.full((5000,), MARK[0], dtype=torch.uint8)
        parcel[0] = step
        parcels = Parcels(step=step, of_layers={LAYER: parcel})
        self.followers.send(parcels)
        return parcels

    def commit(self, step: int) -> None:

        def state_of(layer: int) -> LayerState:
            return rich_state(layer, seed=step)

        change = CommittedChange(step=step, scale=0.5, lr=0.1, skipped=False, scores={LAYER: 0.25})
        self.followers.commit(change, state_of, None)


@pytest.fixture
def leading() -> Iterator[Leading]:
    followers = Followers()
    followers.begin(GENERATION)
    with serving(flow=LIVELY, followers=followers) as to:
        yield Leading(followers, to)


def test_a_peer_gets_the_layers_once_and_then_each_change(leading: Leading) -> None:
    with leading.followed() as following:
        leading.commit(17)
        came = following.states()
        assert came.step == 17
        assert [bits(state) for state in came.states] == [bits(rich_state(LAYER, seed=17))]
        changes = following.changes()
        for step in (18, 19):
            sent = leading.send(step)
            leading.commit(step)
            change, parcels = next(changes)
            assert change == CommittedChange(
                step=step, scale=0.5, lr=0.1, skipped=False, scores={LAYER: 0.25}
            )
            assert parcels.step == step
            assert torch.equal(parcels.of_layers[LAYER], sent.of_layers[LAYER])


def test_parcels_of_a_step_that_is_not_committed_change_nothing(leading: Leading) -> None:
    with leading.followed() as following:
        leading.commit(17)
        assert following.states().step == 17
        leading.send(18)
        with fetching(lambda: next(following.changes())) as got:
            eventually("its reader waits", lambda: leading.signs > 0)
            leading.followers.begin(GENERATION + 1)
        assert isinstance(got[0], Absent)
        assert f"generation {GENERATION} is over" in str(got[0])


def test_an_error_while_following_is_told_as_what_it_is(leading: Leading) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    where = rf"layers \[{LAYER}\] from {HOST}:{leading.to.server.port}"
    with pytest.raises(PeerGone, match=f"^{where}: No space left on device$"), leading.followed():
        raise full


def test_an_owner_that_does_not_listen_is_told_as_such(leading: Leading) -> None:
    leading.to.server.close()
    with pytest.raises(PeerGone, match="cannot connect: Connection refused"), leading.followed():
        pass


def test_nothing_of_an_altered_change_arrives(leading: Leading) -> None:
    def alter(_: int, piece: bytes) -> bytes:
        return piece.replace(MARK, MARK[:-1] + b"Y", 1)

    with between(leading.to, alter) as port, leading.followed(port) as following:
        leading.commit(17)
        assert following.states().step == 17
        leading.send(18)
        leading.commit(18)
        with pytest.raises(StreamRefused, match=r"chunk frame .* was altered"):
            next(following.changes())


def test_cutting_it_wakes_its_reader_at_once(leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "POLL_S", 1000.0)
    with leading.followed() as following, fetching(following.states) as got:
        eventually("its reader waits", lambda: leading.signs > 0)
        following.cut()
        eventually("its reader ends", lambda: bool(got))
        assert isinstance(got[0], PeerGone)
