"""Places of a plan: numbers, pipelines and pipeline ranks."""

from __future__ import annotations

import pickle
from dataclasses import replace

from planner.codec import from_json, to_json
from planner.plan import Place, Plan


def plan(replicas: int) -> Plan:
    """Five layers in four stages on three pipeline ranks, the last of which holds two stages."""
    return Plan(
        epoch=1,
        version=1,
        reason="",
        layers=((0, 1), (1, 2), (2, 4), (4, 5)),
        stage_ranks=(2, 0, 1, 2),
        schedule="1f1b",
        chunks=1,
        microbatches=2,
        replicas=replicas,
    )


def test_a_number_is_a_place_and_siblings_share_a_pipeline_rank() -> None:
    whole = plan(replicas=3)
    assert [whole.place(number) for number in (0, 2, 3, 8)] == [(0, 0), (0, 2), (1, 0), (2, 2)]
    assert whole.place(7) == Place(pipeline=2, rank=1) == Place.of(7, 3)
    assert whole.siblings(1) == (1, 4, 7)
    assert {whole.place(number).rank for number in whole.siblings(1)} == {1}


def test_the_layers_of_a_place_are_those_of_its_pipeline_rank() -> None:
    whole = plan(replicas=2)
    assert [whole.layers_of_place(number) for number in range(6)] == [(1,), (2, 3), (0, 4)] * 2


def test_a_layer_has_an_owner_in_every_pipeline_and_copies_beside_them() -> None:
    whole = plan(replicas=2)
    assert [whole.owners_of(layer) for layer in range(5)] == [(2, 5), (0, 3), (1, 4), (1, 4), (2, 5)]
    assert whole.copies_of(3) == ()
    assert replace(whole, standbys=((), (), (), (0, 5), ())).copies_of(3) == (0, 5)


def test_a_plan_arrives_as_it_was_sent() -> None:
    copied = replace(
        plan(replicas=3),
        reason="as it began",
        pipelines=2,
        shares=(4, 2),
        standbys=((), (0,), (3, 1), (5,), ()),
        recompute=(1, 3),
        predicted_step_s=0.1 + 0.2,
    )
    shared = replace(plan(replicas=2), shard="optimizer")
    shared = replace(shared, standbys=tuple((n % 3,) for n in range(len(shared.pieces))))
    kept = replace(plan(replicas=3), snapshots=((), (0,), (3, 1), (5,), ()), snapshot_every=4)
    for sent in (plan(replicas=3), copied, shared, kept, even(9)):
        assert sent.world_size
        arrived = pickle.loads(pickle.dumps(sent))
        assert arrived == sent
        assert to_json(arrived) == to_json(sent)
        assert arrived.layers_of_place(1) == sent.layers_of_place(1)
        assert arrived.copied == sent.copied
        assert arrived.snapshots_at(1) == sent.snapshots_at(1)
        assert from_json(Plan, to_json(sent)) == sent


def test_a_regular_plan_takes_hardly_more_bytes_for_a_thousand_ranks_than_for_eight() -> None:
    sizes = [len(pickle.dumps(even(ranks))) for ranks in (8, 1000)]
    assert sizes[1] < sizes[0] + 100


def even(ranks: int) -> Plan:
    return Plan(
        epoch=1,
        version=1,
        reason="",
        layers=tuple((2 * rank, 2 * rank + 2) for rank in range(ranks)),
        stage_ranks=tuple(range(ranks)),
        schedule="1f1b",
        chunks=1,
        microbatches=8,
        replicas=1,
        standbys=tuple(((layer // 2 + 1) % ranks,) for layer in range(2 * ranks)),
    )
