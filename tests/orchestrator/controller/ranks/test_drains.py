"""Which ranks must leave by when because Ray drains their nodes, and the text of a notice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from pace import patient

from orchestrator.controller.ranks.drains import Fresh, drained, watch_drains
from orchestrator.events.types import Noticed, RankStarted, Warned
from orchestrator.lifecycle.stimuli import Going, Noted


def home(rank: int, node: str) -> RankStarted:
    return RankStarted(rank=rank, node=node, host=f"10.0.0.{ord(node)}", pid=rank)


HOMES = {rank: home(rank, node) for rank, node in enumerate("aabbcc")}


def going(node: str, ranks: tuple[int, ...], left_s: float | None) -> Going:
    return Going(frozenset(ranks), "ray", left_s, node, f"10.0.0.{ord(node)}")


def noticed(ranks: tuple[int, ...], left_s: float | None, source: str) -> Noticed:
    return Noticed(node="b", host="10.0.0.98", source=source, ranks=ranks, left_s=left_s)


def test_each_draining_node_with_ranks_is_noticed_the_most_urgent_first() -> None:
    table = {"a": 0, "b": 130_000, "c": 90_000, "elsewhere": 95_000}
    assert drained(table, HOMES, now_s=100.0) == (
        going("c", (4, 5), 0.0),
        going("b", (2, 3), 30.0),
        going("a", (0, 1), None),
    )


def test_a_drain_is_told_once_until_something_about_it_changes() -> None:
    fresh = Fresh()
    few: Mapping[int, RankStarted] = {rank: HOMES[rank] for rank in (0, 2, 3)}
    assert fresh.collect({"a": 130_000}, few, 100.0) == (going("a", (0,), 30.0),)
    assert fresh.collect({"a": 130_000}, few, 101.0) == ()
    # Fewer ranks are no news; another rank or another deadline is.
    assert fresh.collect({"a": 130_000}, {2: HOMES[2]}, 102.0) == ()
    assert fresh.collect({"a": 130_000}, HOMES, 103.0) == (going("a", (0, 1), 27.0),)
    assert fresh.collect({"a": 110_000}, HOMES, 104.0) == (going("a", (0, 1), 6.0),)
    # The drain is called off, then starts again.
    assert fresh.collect({}, HOMES, 105.0) == ()
    assert fresh.collect({"a": 110_000}, HOMES, 106.0) == (going("a", (0, 1), 4.0),)


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (noticed((2, 3), 90.0, "aws"), "ranks 2, 3 on 10.0.0.98 must leave (aws, 1 min 30 s left)"),
        (noticed((), None, "aws"), "a rank that is already gone must leave (aws)"),
        (noticed((3,), None, "sigterm"), "rank 3 on 10.0.0.98 must leave (sigterm)"),
    ],
)
def test_a_notice_in_words(notice: Noticed, text: str) -> None:
    assert notice.sentence == text


def test_the_watch_tells_drains_and_bears_a_table_that_fails() -> None:
    looks = iter([{}, OSError("no GCS"), {"b": 0}, OSError("no GCS"), {"b": 0}, {"b": 0, "c": 0}])
    told: list[Going | Noted] = []

    async def run() -> None:
        over = asyncio.Event()

        def table() -> Mapping[str, int]:
            look = next(looks, None)
            if look is None:
                loop.call_soon_threadsafe(over.set)
                return {}
            if isinstance(look, OSError):
                raise look
            return look

        loop = asyncio.get_running_loop()
        watch = asyncio.create_task(watch_drains(lambda: HOMES, told.append, table=table, every_s=0.001))
        await over.wait()
        watch.cancel()

    asyncio.run(asyncio.wait_for(run(), patient(10)))
    assert told == [
        Noted(Warned(text="Ray does not say which nodes it drains: no GCS")),
        going("b", (2, 3), None),
        going("c", (4, 5), None),
    ]
