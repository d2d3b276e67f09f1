"""Which layers are where, half-way through a move and before and after it."""

from __future__ import annotations

from dataclasses import replace

from synthetic_run import plan, records

from orchestrator.analysis.layer_map import LayerBox, LayerMap, layer_map
from orchestrator.events.types import (
    Event,
    Finished,
    Formed,
    Issued,
    Noticed,
    Placing,
    RankStarted,
    Record,
)
from orchestrator.history.job_view import JobView, fold
from workers.protocol.reports import SwitchReport

MOVED = replace(plan(), version=2, reason="layer 3 moves", layers=((0, 4), (4, 5), (5, 7), (7, 10)))


def view(*events: Event) -> JobView:
    log = [record for record in records(steps=10) if not isinstance(record.event, Finished)]
    return fold([*log, *(Record(time_s=log[-1].time_s + 1, event=event) for event in events)])


def mapped(*events: Event) -> LayerMap:
    found = layer_map(view(*events))
    assert found is not None
    return found


def stages(found: LayerMap) -> dict[int, dict[int, list[LayerBox]]]:
    return {
        rank.rank: {stage.stage: list(stage.layers) for stage in rank.stages}
        for node in found.nodes
        for rank in node.ranks
    }


def test_each_layer_is_on_the_rank_that_owns_it_and_each_rank_on_its_node() -> None:
    found = mapped()
    assert [(node.id, [rank.rank for rank in node.ranks]) for node in found.nodes] == [
        ("5f0c", [0, 1]),
        ("a91e", [2, 3]),
    ]
    assert {
        rank: [box.layer for boxes in of.values() for box in boxes] for rank, of in stages(found).items()
    } == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6], 3: [7, 8, 9]}
    assert (found.moving, found.version, found.next) == ((), "1.1", "")


def test_a_layer_on_its_way_is_at_both_ranks_until_the_ranks_follow_the_plan() -> None:
    found = mapped(Issued(plan=MOVED))
    assert (found.moving, found.version, found.next) == ((3,), "1.1", "1.2")
    assert stages(found)[1] == {1: [LayerBox(3, "leaving", (0,)), LayerBox(4, "here")]}
    assert stages(found)[0][0][-1] == LayerBox(3, "arriving", (1,))
    after = mapped(Issued(plan=MOVED), switch())
    assert (after.moving, after.version, after.next) == ((), "1.2", "")
    assert stages(after)[0] == {0: [LayerBox(layer, "here") for layer in (0, 1, 2, 3)]}


def test_a_layer_that_is_copied_to_its_next_owner_is_on_its_way_too() -> None:
    copying = replace(plan(), version=2, reason="layer 3 moves", standbys=((),) * 3 + ((0,),) + ((),) * 6)
    for seen in ((Issued(plan=copying),), (Issued(plan=copying), switch())):
        found = mapped(*seen)
        assert found.moving == (3,)
        assert stages(found)[1][1][0] == LayerBox(3, "leaving", (0,))
        assert stages(found)[0][0][-1] == LayerBox(3, "arriving", (1,))
    owned = replace(MOVED, version=3, standbys=((),) * 3 + ((1,),) + ((),) * 6)
    last = replace(MOVED, version=4)
    for seen in ((switch(3),), (switch(3), Issued(plan=last)), (switch(3), Issued(plan=last), switch(4))):
        assert mapped(Issued(plan=copying), switch(), Issued(plan=owned), *seen).moving == ()


def switch(version: int = 2) -> SwitchReport:
    return SwitchReport(
        epoch=1,
        version=version,
        rank=0,
        step=10,
        taken=(),
        given=(),
        brought_bytes=0,
        brought_s=0.0,
        stall_s=0.0,
        switched_s=0.0,
    )


def test_spares_starting_ranks_and_leaving_nodes_are_marked() -> None:
    found = mapped(
        RankStarted(rank=4, node="c3", host="10.0.0.6", pid=9),
        Placing(ranks=(5,)),
        Noticed(node="a91e", host="10.0.0.4", source="aws", ranks=(2, 3), left_s=60.0),
    )
    states = {rank.rank: rank.state for node in found.nodes for rank in node.ranks}
    assert states == {0: "trains", 1: "trains", 2: "leaves", 3: "leaves", 4: "spare", 5: "starts"}
    assert {node.id: node.leaving for node in found.nodes} == {
        "5f0c": False,
        "a91e": True,
        "c3": False,
        "": False,
    }


def test_there_is_no_map_before_a_job_has_formed() -> None:
    begun = [record for record in records() if not isinstance(record.event, Formed)]
    assert layer_map(fold(begun[:3])) is None
