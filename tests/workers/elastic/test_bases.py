"""Which layers owners copy for their standby ranks: those that lack a copy, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import SECRET, state_sha256, with_standbys

from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from planner.plan import Plan
from workers.elastic import holdings
from workers.launch.ranks import assignment
from workers.protocol.orders import CommitOutcome, Generation, Request
from workers.protocol.reports import Outcome, Parted
from workers.rank import Rank
from workers.state.layer_state import LayerState, host_copy

RANKS = 3


class Threads:
    """Three ranks as threads, and the layers that their owners copied in the newest generation."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = small_config(output, steps=6)
        self.job = job(self.config, ranks=RANKS, schedule="1f1b")
        self.copied: list[int] = []
        self._ranks = [
            Rank(self.config, number, lambda report: None, secret=SECRET) for number in range(RANKS)
        ]
        self._generation = 0

        def copy(state: LayerState) -> LayerState:
            self.copied.append(state.layer)
            return host_copy(state)

        monkeypatch.setattr(holdings, "host_copy", copy)
        for rank in self._ranks:
            rank.setup()

    def train(self, plan: Plan, step: int, *, regroup: bool) -> dict[int, Outcome | Parted]:
        """Train one generation; with `regroup` it ends at its first commit."""
        self._generation += 1
        self.copied.clear()
        hub = Hub(RANKS, timeout_s=60.0)
        ended: dict[int, Outcome | Parted] = {}

        def host(number: int) -> None:
            rank = self._ranks[number]
            try:
                given = replace(assignment(self.job, number), plan=plan, step=step)
                assert rank.follow(given) is None
                rank.join(self._new_generation(), LocalChannel(hub, number))
                if regroup:
                    rank.request(Request.REGROUP)
                ended[number] = rank.train()
            finally:
                if number not in ended:
                    hub.close()

        threads = [threading.Thread(target=host, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ended) == [*range(RANKS)]
        for rank in self._ranks:
            rank.finish_commit(CommitOutcome(step=rank.position().step, reported=step))
        return ended

    def _new_generation(self) -> Generation:
        return Generation(
            number=self._generation,
            epoch=1,
            members=tuple(range(RANKS)),
            store_host="127.0.0.1",
            store_port=1,
            timeout_s=60.0,
        )

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    made = Threads(tmp_path, monkeypatch)
    yield made
    made.close()


def test_owners_copy_only_the_layers_of_which_a_copy_is_missing(threads: Threads) -> None:
    kept, moved = with_standbys(threads.job), with_standbys(threads.job, shift=2)
    threads.train(kept, 0, regroup=True)
    assert threads.copied == [], "all begin with what the seed gives"
    threads.train(kept, 1, regroup=True)
    assert threads.copied == [], "each copy stays where it is"
    one_moved = replace(kept, standbys=(moved.standbys[0], *kept.standbys[1:]))
    threads.train(one_moved, 2, regroup=True)
    assert threads.copied == [0]
    ended = threads.train(moved, 3, regroup=False)
    assert set(threads.copied) >= {*range(1, 8)}
    assert state_sha256(ended) == run_threads(job(threads.config)).state_sha256
