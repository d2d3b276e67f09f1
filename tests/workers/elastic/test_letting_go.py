"""A rank outside the group lets go of what it copied and built for a place that it does not get."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from pace import patient

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.shards import Piece, Shard
from workers.copies.standby import LiveCopy
from workers.launch.ranks import assignment
from workers.protocol.orders import CopyAhead, Generation, Request, StateSource
from workers.protocol.reports import CopiedAhead, Outcome, Report, StepReport, WarningReport
from workers.rank import Rank
from workers.state_stream import follow, stream

SECRET, HOST = b"a secret of the tests", "127.0.0.1"
LAYERS = (1, 2, 5)
BUILDING = (Piece(1, Shard(0, 2)), Piece(2, Shard(0, 2)))
GENERATION = Generation(number=4, epoch=1, members=(0,), store_host="", store_port=0, timeout_s=60.0)


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(30)
    while not there():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


class Spare:
    """A rank without a place, beside one that trains."""

    def __init__(self, output: Path) -> None:
        config = small_config(output, steps=100_000)
        self.reports = list[Report]()
        self.trained = list[Report]()
        self.rank = Rank(config, 1, self.reports.append, secret=SECRET)
        self.rank.setup()
        self.owner = Rank(config, 0, self.trained.append, secret=SECRET)
        self.owner.setup()
        self.first = assignment(job(config), 0)
        assert self.owner.follow(self.first) is None
        self.owner.join(GENERATION, LocalChannel(Hub(1, timeout_s=60.0), 0))
        self.ended = list[object]()
        self.training = threading.Thread(target=lambda: self.ended.append(self.owner.train()))
        self.training.start()
        until(lambda: any(isinstance(one, StepReport) for one in self.trained))

    def order(self, change: int, layers: tuple[int, ...] = LAYERS) -> CopyAhead:
        return CopyAhead(
            epoch=1,
            change=change,
            generation=GENERATION.number,
            sources=tuple(
                StateSource(layer=layer, rank=0, host=HOST, port=self.owner.port) for layer in layers
            ),
            building=BUILDING if layers else (),
            patience_s=60.0,
        )

    def copied(self, change: int) -> list[Callable[[], object]]:
        """Have the rank copy; returns what is no longer there once its modules and copies are gone."""
        self.rank.copy_ahead(self.order(change))
        until(lambda: any(isinstance(one, CopiedAhead) and one.change == change for one in self.reports))
        (told,) = [one for one in self.reports if isinstance(one, CopiedAhead) and one.change == change]
        assert told.error is None
        copying = self.rank._coming._copies
        assert copying is not None
        (owner,) = copying._owners.values()
        assert owner.copies is not None
        copied = [one.kept.base for one in owner.copies._copies.values() if isinstance(one.kept, LiveCopy)]
        bases = [*copied, *self.rank._coming.modules._built.values()]
        return [weakref.ref(layer.module) for layer, _ in bases if layer is not None]

    @property
    def clean(self) -> bool:
        coming = self.rank._coming.modules
        return not coming.wanted and not coming._built

    def close(self) -> None:
        self.owner.request(Request.STOP)
        self.training.join(60)
        for rank in (self.rank, self.owner):
            rank.close()
        assert [type(one) for one in self.ended] == [Outcome]


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    # A machine that stands still for seconds ends no connection here.
    for end in (follow, stream):
        monkeypatch.setattr(end, "HANDSHAKE_S", 60.0)
    made = Spare(tmp_path)
    yield made
    made.close()


def test_an_order_without_layers_frees_what_was_copied_and_built(spare: Spare) -> None:
    held = spare.copied(1)
    assert len(held) == len(LAYERS) + len(BUILDING)
    spare.rank.copy_ahead(spare.order(2, ()))
    assert spare.clean
    assert [one() for one in held] == [None] * len(held)
    # One from before that comes late copies nothing, and a newer one does.
    spare.rank.copy_ahead(spare.order(1))
    assert spare.clean
    assert spare.rank._coming._copies is None
    spare.copied(3)
    assert [one.change for one in spare.reports if isinstance(one, CopiedAhead)] == [1, 3]
    assert not [one for one in spare.reports if isinstance(one, WarningReport)]


def test_who_waits_for_a_change_in_vain_frees_what_it_has(spare: Spare) -> None:
    held = spare.copied(1)
    copying = spare.rank._coming._copies
    assert copying is not None
    copying._began_s -= 60.0
    until(lambda: spare.clean)
    until(lambda: all(one() is None for one in held))
    # Should the ranks regroup after all, it fetches the layers, and says why.
    spare.rank.leave(GENERATION.number)
    sources = spare.order(1).sources
    told = replace(spare.first, step=3, sources=sources)
    assert copying.for_assignment(told, GENERATION.number) == {}
    (warned,) = [one for one in spare.reports if isinstance(one, WarningReport)]
    assert warned.text == (
        "layers that rank 1 copied ahead are fetched again: the copies of layers [1, 2, 5] have not come: the ranks"
        " did not regroup within 60 s"
    )


def test_patience_that_ends_late_drops_nothing_that_a_newer_order_built(spare: Spare) -> None:
    spare.copied(1)
    spare.copied(2)
    spare.rank._coming._let_go(spare.order(1))
    assert not spare.clean
    spare.rank._coming._let_go(spare.order(2))
    assert spare.clean
