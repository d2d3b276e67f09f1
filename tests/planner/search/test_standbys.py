"""The places of standbys: in another domain if there is one, near the heirs, and with a balanced load."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_profile import plan

from planner.failure_domains import domain_name, lacking, zone_of
from planner.plan import Plan
from planner.schedule.registry import families
from planner.search.standbys import assign, protected


def loads(places: tuple[tuple[int, ...], ...], sizes: list[int], world: int) -> list[int]:
    carried = [0] * world
    for chosen_places, size in zip(places, sizes, strict=True):
        for place in chosen_places:
            carried[place] += size
    return carried


def test_one_rank_has_nobody() -> None:
    assert assign(plan(3), ["a"], [1, 1, 1]) == ((), (), ())


def test_two_ranks_stand_by_each_other() -> None:
    assert assign(plan(2, 1), ["a", "a"], [5, 5, 5]) == ((1,), (1,), (0,))


def test_copies_follow_each_step_or_are_taken_every_few() -> None:
    made = replace(plan(2, 1), standbys=((0,), (0,), (1,)))
    places = ((1,), (1,), (0,))
    each_step = protected(made, ["a", "b", "c"], [5, 5, 5], 1, 1)
    assert (each_step.standbys, each_step.snapshots, each_step.snapshot_every) == (places, (), 0)
    taken = protected(each_step, ["a", "b", "c"], [5, 5, 5], 1, 4)
    assert (taken.standbys, taken.snapshots, taken.snapshot_every) == ((), places, 4)
    assert protected(taken, ["a", "b", "c"], [5, 5, 5], 0, 4) == replace(made, standbys=())
    # Replicas on other nodes are each other's copies, and nobody fetches.
    siblings = replace(plan(1, 1, replicas=2), standbys=())
    assert protected(siblings, ["a", "a", "b", "b"], [5, 5], 1, 4).snapshots == ()


def test_a_stage_gives_its_first_layers_to_the_place_before_and_its_last_to_the_place_after() -> None:
    chosen = assign(plan(*[4] * 5), list("abcde"), [10] * 20)
    assert chosen[:5] == ((1,), (1,), (1,), (1,), (0,))
    assert chosen[12:16] == ((2,), (2,), (4,), (4,))
    assert max(loads(chosen, [10] * 20, 5)) == 50


def test_eight_ranks_on_four_nodes_carry_alike_and_nothing_stays_on_its_node() -> None:
    domains = [f"node{rank // 2}" for rank in range(8)]
    made = plan(*[3] * 8)
    chosen = assign(made, domains, [10] * 24)
    for layer, (place,) in enumerate(chosen):
        assert domains[place] != domains[layer // 3]
        # Copies are on the next node on either side.
        assert abs(place // 2 - layer // 6) == 1
    carried = loads(chosen, [10] * 24, 8)
    assert max(carried) <= 40
    assert min(carried) >= 20


def test_siblings_in_other_domains_serve() -> None:
    twice = plan(2, 2, replicas=2)
    assert assign(twice, ["a", "a", "b", "b"], [1] * 4) == ((),) * 4
    # With a single domain a sibling is as good as any other place.
    assert assign(twice, ["a"] * 4, [1] * 4) == ((),) * 4


def test_siblings_in_one_domain_do_not_where_there_is_another() -> None:
    twice = plan(2, 2, replicas=2)
    # Both owners of rank 0's layers are in domain a, those of rank 1's in b.
    chosen = assign(twice, ["a", "b", "a", "b"], [1] * 4)
    assert [{place % 2 for place in places} for places in chosen] == [{1}, {1}, {0}, {0}]
    assert max(loads(chosen, [1] * 4, 4)) == 1
    # The owners of rank 0's layers are both in a, those of rank 1's in different domains.
    assert assign(twice, ["a", "a", "a", "b"], [1] * 4) == ((3,), (3,), (), ())


def test_fewer_pipelines_than_replicas_have_as_many_owners_as_pipelines() -> None:
    once = plan(2, 2, replicas=2, pipelines=1)
    assert assign(once, ["a", "b"], [1] * 4) == ((1,), (1,), (0,), (0,))


def test_the_numbers_must_belong_to_the_plan() -> None:
    with pytest.raises(ValueError, match="2 places, and 3 domains"):
        assign(plan(1, 1), ["a"] * 3, [1, 1])
    with pytest.raises(ValueError, match="2 layers, and the bytes of 3"):
        assign(plan(1, 1), ["a"] * 2, [1, 1, 1])


def random_plan(rng: Random) -> Plan:
    family = rng.choice([*families().values()])
    ranks, chunks = rng.randint(1, 6), family.default_chunks
    stages = family.stages(ranks, chunks)
    layers = stages + rng.randint(0, 2 * stages)
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    replicas = rng.randint(1, 3)
    return replace(
        plan(*[stop - first for first, stop in pairwise(cuts)], schedule=family.name, chunks=chunks),
        replicas=replicas,
        pipelines=rng.choice([None, *range(1, replicas + 1)]),
    )


@pytest.mark.parametrize("seed", range(200))
def test_any_one_domain_can_be_lost(seed: int) -> None:
    rng = Random(seed)
    made = random_plan(rng)
    places, layers = made.world_size, made.layers[-1][1]
    domains = [f"node{rng.randrange(rng.randint(1, 4))}" for _ in range(places)]
    sizes = [rng.choice([0, 1, 7, 100]) for _ in range(layers)]
    chosen = assign(made, domains, sizes)
    assert chosen == assign(made, domains, sizes)
    for layer, chosen_places in enumerate(chosen):
        owner = made.stage_ranks[made.stage_of_layer(layer)]
        owners = {*range(owner, places, made.pipeline_ranks)}
        assert not owners & {*chosen_places}
        holders = {domains[place] for place in owners | {*chosen_places}}
        if len({*domains}) > 1:
            assert len(holders) > 1
        elif places > 1:
            assert len(owners | {*chosen_places}) > 1
        if len({domains[place] for place in owners}) > 1 or places == 1:
            assert chosen_places == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_equal_ranks_have_a_nearly_equal_load(ranks: int, per_node: int) -> None:
    """The load is as even as nodes allow: only a last node that is not full keeps copies for other nodes than
    those that keep its own."""
    domains = [f"node{rank // per_node}" for rank in range(ranks)]
    chosen = assign(plan(*[6] * ranks), domains, [10] * 6 * ranks)
    carried = loads(chosen, [10] * 6 * ranks, ranks)
    whole = sum(carried)
    assert whole == 60 * ranks
    if ranks % per_node == 0:
        assert max(carried) <= 1.5 * whole / ranks


@st.composite
def placements(draw: st.DrawFn) -> tuple[Plan, list[str], list[int], int]:
    """A plan, the domains of its places (some with zones), the bytes of its layers, and how many copies."""
    ranks, pipelines = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    counts = [draw(st.integers(1, 3)) for _ in range(ranks)]
    nodes = draw(st.integers(1, 6))
    zones = [draw(st.sampled_from(["", "x", "y", "z"])) for _ in range(nodes)]
    where = [draw(st.integers(0, nodes - 1)) for _ in range(ranks * pipelines)]
    sizes = [draw(st.sampled_from([0, 1, 7, 100])) for _ in range(sum(counts))]
    domains = [domain_name(f"n{node}", zones[node]) for node in where]
    return plan(*counts, replicas=pipelines), domains, sizes, draw(st.integers(1, 3))


@settings(max_examples=100, deadline=None)
@given(placements())
def test_as_many_domains_as_asked_hold_each_layer_in_as_many_zones_as_there_are(
    placed: tuple[Plan, list[str], list[int], int],
) -> None:
    made, domains, sizes, copies = placed
    chosen = assign(made, domains, sizes, copies)
    assert chosen == assign(made, domains, sizes, copies)
    for layer, places in enumerate(chosen):
        assert list(places) == sorted({*places})
        owners = made.owners_of(layer)
        theirs = {domains[place] for place in owners}
        if len({*domains}) == 1:
            assert len(places) == (len(owners) == 1 < made.world_size)
            assert not {*places} & {*owners}
            continue
        # Whichever `copies` domains are lost, one that is left holds the layer, if there were more.
        holders = [*theirs, *(domains[place] for place in places)]
        assert len(holders) == len({*holders})
        assert len(holders) == max(len(theirs), min(copies + 1, len({*domains})))
        known = {zone_of(domain) for domain in domains} - {""}
        owned = {zone_of(domain) for domain in theirs} - {""}
        assert len({zone_of(domain) for domain in holders} - {""}) == min(
            len(owned) + len(places), len(known)
        )


def test_two_copies_on_six_ranks_are_near_and_carried_alike() -> None:
    chosen = assign(plan(*[2] * 6), list("abcdef"), [10] * 12, 2)
    assert all(0 < abs(place - layer // 2) <= 2 for layer, places in enumerate(chosen) for place in places)
    assert all(len(places) == 2 for places in chosen)
    assert loads(chosen, [10] * 12, 6) == [40] * 6


def test_a_copy_is_in_another_zone_though_a_nearer_node_is_in_the_same_one() -> None:
    zoned = ["x/a", "x/b", "y/c", "y/d"]
    assert [{zoned[place][0] for place in places} for places in assign(plan(1, 1, 1, 1), zoned, [1] * 4)] == [
        {"y"},
        {"y"},
        {"x"},
        {"x"},
    ]
    # The second copy is in the zone of the first or of the layer: there is no third one.
    for places in assign(plan(1, 1, 1, 1), zoned, [1] * 4, 2):
        assert {zoned[place][0] for place in places} == {"x", "y"} or len(places) == 2


def test_replicas_on_two_nodes_are_one_copy_of_two() -> None:
    twice = plan(2, 2, replicas=2)
    assert assign(twice, ["a", "a", "b", "b"], [1] * 4, 2) == ((),) * 4
    more = assign(twice, ["a", "b", "c", "d"], [1] * 4, 2)
    assert all(len(places) == 1 for places in more)


def test_too_few_domains_for_the_copies_are_told_in_words() -> None:
    assert lacking(["a", "b", "b"], 2) == (
        "elastic.copies = 2 needs 3 failure domains, and the job has 2 nodes: a layer and its copies are each on"
        " another node"
    )
    assert lacking(["a", "b", "c"], 2) is None
    assert lacking(["a", "a"], 1) is None


@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
)
def test_an_owner_of_a_shard_and_its_copies_are_in_different_domains(
    ranks: int, replicas: int, copies: int, nodes: list[int]
) -> None:
    made = replace(plan(*[2] * ranks, replicas=replicas), shard="optimizer")
    domains = [f"node {nodes[place]}" for place in range(made.world_size)]
    chosen = assign(made, domains, [10] * 2 * ranks, copies)
    assert len(chosen) == len(made.pieces) == 2 * ranks * replicas
    kinds = len(set(domains))
    for piece, places in zip(made.pieces, chosen, strict=True):
        held = [made.owner_of(piece), *places]
        assert len(set(held)) == len(held)
        if kinds == 1:
            assert len(held) == 2
        else:
            assert len({domains[place] for place in held}) == len(held) == min(copies + 1, kinds)


def test_copies_of_shards_are_spread_evenly() -> None:
    made = replace(plan(2, 2, replicas=2), shard="optimizer")
    chosen = assign(made, list("abcd"), [10] * 4)
    assert loads(chosen, [5] * 8, 4) == [10] * 4
    # A sibling owns another shard of the layer, and may keep a copy of this one.
    kept = replace(made, standbys=chosen)
    assert sorted(piece for place in range(4) for piece in kept.copies_at(place)) == sorted(made.pieces)
