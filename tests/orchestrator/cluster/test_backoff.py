"""A node on which ranks fail to start is tried less and less often, until one starts there."""

from __future__ import annotations

from orchestrator.cluster.ray_hosts import MOST_PAUSE_S, Backoff


def test_each_failure_in_a_row_doubles_the_pause() -> None:
    backoff = Backoff()
    assert [backoff.failed("bad", 100.0) for _ in range(4)] == [2.0, 4.0, 8.0, 16.0]
    assert backoff.avoids("bad", 115.9)
    assert not backoff.avoids("bad", 116.0)
    assert not backoff.avoids("good", 100.0)
    assert [backoff.failed("bad", 200.0) for _ in range(9)][-1] == MOST_PAUSE_S


def test_a_rank_that_starts_clears_its_node() -> None:
    backoff = Backoff()
    backoff.failed("node", 0.0)
    backoff.failed("node", 10.0)
    backoff.started("node")
    assert not backoff.avoids("node", 11.0)
    assert backoff.failed("node", 20.0) == 2.0
