"""Which links are probed, and what stands in for those that are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.profiling.link_probe import MOST_ROUNDS, SMALL_BYTES, Seen, all_links
from workers.profiling.probe_rounds import Pairs, rounds

MEGABYTE = 2**20
RING = 3
"""The most rounds that neighbours on a ring take."""


def probed(machines: Sequence[str], *, apart: bool) -> list[Pairs]:
    """The rounds; checks that each has disjoint pairs."""
    found = rounds(machines, MOST_ROUNDS, apart=apart)
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
        assert pairs
    return found


def met(machines: Sequence[str], found: list[Pairs]) -> set[frozenset[str]]:
    return {frozenset((machines[a], machines[b])) for pairs in found for a, b in pairs}


def wanted(machines: Sequence[str]) -> set[frozenset[str]]:
    """All pairs of machines, and each machine with two ranks paired with itself."""
    return {
        frozenset((first, second))
        for a, first in enumerate(machines)
        for b, second in enumerate(machines)
        if a != b
    }


placements = st.lists(st.sampled_from("ABCDEFGHIJKLMNOP"), min_size=1, max_size=64)
"""The machine of each rank: up to 16 machines, in any order."""


@pytest.mark.parametrize("ranks", range(1, 17))
def test_of_few_gpus_every_pair_is_probed_once(ranks: int) -> None:
    found = probed(["A", "B"] * (ranks // 2) + ["A"] * (ranks % 2), apart=True)
    assert sorted(pair for pairs in found for pair in pairs) == [
        (a, b) for a in range(ranks) for b in range(a + 1, ranks)
    ]
    assert len(found) <= MOST_ROUNDS


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64])
def test_on_one_machine_of_cpus_one_round_is_enough(ranks: int) -> None:
    (pairs,) = probed(["A"] * ranks, apart=False)
    assert len(pairs) == ranks // 2


@given(machines=placements, apart=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_two_machines_meet_in_few_rounds_whichever_ranks_they_have(
    machines: list[str], apart: bool
) -> None:
    found = probed(machines, apart=apart)
    assert wanted(machines) <= met(machines, found)
    every = {pair for pairs in found for pair in pairs}
    if len(set(machines)) > 1:
        assert {(a, a + 1) for a in range(len(machines) - 1)} <= every
    others = len(set(machines))
    assert len(found) <= (MOST_ROUNDS + RING + 1 if apart else RING + 1 + others)


def test_four_machines_of_two_ranks_take_three_rounds() -> None:
    assert probed(["A", "A", "B", "B", "C", "C", "D", "D"], apart=False) == [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 7), (1, 2), (3, 4), (5, 6)],
        [(0, 4), (2, 6)],
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_very_many_machines_do_not_take_ever_more_rounds(apart: bool) -> None:
    machines = [f"{rank // 4}" for rank in range(256)]
    assert MOST_ROUNDS <= len(probed(machines, apart=apart)) <= MOST_ROUNDS + RING + 1


def seen_of(
    found: list[Pairs], latency_s: dict[tuple[str, str], float], machines: Sequence[str]
) -> list[Seen]:
    """What both ends of every probed pair see if `latency_s` gives the latency between two machines."""
    return [
        Seen(
            source=source,
            target=target,
            size_bytes=size,
            held_s=0.0,
            transfer_s=latency_s[machines[source], machines[target]] + size * 1e-9 if sender else None,
        )
        for pairs in found
        for a, b in pairs
        for source, target in ((a, b), (b, a))
        for size in (SMALL_BYTES, MEGABYTE)
        for sender in (True, False)
    ]


@given(machines=placements, apart=st.booleans(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_link_is_the_one_between_its_two_machines(
    machines: list[str], apart: bool, data: st.DataObject
) -> None:
    names = sorted(set(machines))
    order = data.draw(st.permutations([(a, b) for a in names for b in names]))
    latency_s = {ends: 1e-3 * (number + 1) for number, ends in enumerate(order)}
    links = all_links(seen_of(probed(machines, apart=apart), latency_s, machines), machines, apart=apart)
    for source, row in enumerate(links):
        for target, link in enumerate(row):
            assert (link is None) == (source == target)
            if link is not None:
                assert link.latency_s == pytest.approx(latency_s[machines[source], machines[target]])


def test_a_gpu_pair_that_was_probed_keeps_its_own_link() -> None:
    machines = ["A"] * 4
    seen = seen_of([[(0, 1)]], {("A", "A"): 1e-3}, machines) + seen_of(
        [[(2, 3)], [(1, 2)]], {("A", "A"): 5e-3}, machines
    )
    links = all_links(seen, machines, apart=True)
    told = [links[a][b] for a, b in ((0, 1), (2, 3), (0, 3))]
    assert [link and round(link.latency_s, 6) for link in told] == [1e-3, 5e-3, 5e-3]
    shared = all_links(seen, machines, apart=False)
    assert {round(link.latency_s, 6) for row in shared for link in row if link is not None} == {5e-3}


def test_machines_that_never_met_have_the_slowest_link() -> None:
    machines = ["A", "B", "C"]
    latency_s = {(a, b): 1e-3 for a in machines for b in machines} | {("B", "C"): 4e-3}
    links = all_links(seen_of([[(0, 1)], [(1, 2)]], latency_s, machines), machines, apart=False)
    slowest, met = links[0][2], links[0][1]
    assert slowest is not None
    assert met is not None
    assert (round(slowest.latency_s, 6), round(met.latency_s, 6)) == (4e-3, 1e-3)
