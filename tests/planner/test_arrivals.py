"""What must come to which places before another plan can be followed: whole layers, or the shards of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import small_profile

from planner.arrivals import arrivals, built_ahead, copied_ahead, needed, new_copies
from planner.plan import Plan
from planner.shards import Piece, Shard


def shared(*counts: int, **changes: Any) -> Plan:
    """Two pipelines that share out states."""
    return small_profile.plan(*counts, replicas=2, shard="optimizer", **changes)


def shard(layer: int, number: int) -> Piece:
    return Piece(layer, Shard(number, 2))


def test_a_shard_comes_to_the_layers_new_rank_in_its_own_pipeline() -> None:
    now, then = shared(2, 2), shared(1, 3)
    assert arrivals(now, then) == ((shard(1, 0), 1), (shard(1, 1), 3))
    # Places 1 and 2 have copies of layer 1: only one of them is of the shard that it will own.
    copies = ((), (), (2,), (0,), (), (), (), ())
    assert arrivals(replace(now, standbys=copies), then) == arrivals(now, then)
    copies = ((), (), (1,), (0,), (), (), (), ())
    assert arrivals(replace(now, standbys=copies), then) == ((shard(1, 1), 3),)


def test_a_copy_of_one_shard_is_none_of_the_other() -> None:
    now = shared(2, 2, standbys=((2,), (0,)) * 2 + ((3,), (1,)) * 2)
    then = replace(now, standbys=((2,), (0,), (3,), (1,)) + ((3,), (1,)) * 2)
    assert new_copies(now, then) == ((shard(1, 0), 3), (shard(1, 1), 1))
    assert new_copies(now, now) == ()


def test_a_place_needs_its_pieces_or_all_of_a_layer_that_was_cut_otherwise() -> None:
    now = shared(2, 2)
    then = shared(1, 3, standbys=((), (1,), *((),) * 6))
    assert needed(now, then, 1) == (shard(0, 1), shard(1, 0), shard(2, 0), shard(3, 0))
    alone = small_profile.plan(1, 1, 2, standbys=((1,), (), (), ()))
    # Copies that it will keep are put together too: those of the old shards go.
    assert needed(now, alone, 1) == (shard(0, 0), shard(0, 1), shard(1, 0), shard(1, 1))
    assert needed(alone, now, 2) == (Piece(0), Piece(1))
    assert needed(alone, alone, 1) == (Piece(0), Piece(1))


def test_ranks_copy_ahead_the_shards_that_they_lack() -> None:
    """Rank 3 leaves, and three ranks go on in one pipeline, or a rank from outside takes its place."""
    now, members = shared(2, 2), (0, 1, 2, 3)
    alone = small_profile.plan(1, 1, 2, replicas=2, pipelines=1)
    ahead = copied_ahead(now, members, alone, (0, 1, 2))
    assert dict(ahead.copied) == {
        **dict.fromkeys(now.pieces, ()),
        shard(0, 1): (0,),
        shard(1, 0): (1,),
        shard(1, 1): (1,),
        shard(2, 0): (2,),
        shard(2, 1): (2,),
        shard(3, 0): (2,),
        shard(3, 1): (2,),
    }
    assert copied_ahead(now, members, now, (0, 1, 2, 4)) == now


def test_ranks_build_the_shards_that_they_have_no_modules_for() -> None:
    now, members = shared(2, 2), (0, 1, 2, 3)
    assert built_ahead(now, members, shared(1, 3), members) == {1: (shard(1, 0),), 3: (shard(1, 1),)}
    # Copies of whole layers have modules, and so has what a rank from outside copies of the same cut.
    assert built_ahead(now, members, now, (0, 1, 2, 4)) == {}
    whole = small_profile.plan(2, 2)
    assert built_ahead(whole, (0, 1), small_profile.plan(1, 3), (0, 1)) == {}
    # Copies in host memory have none.
    fewer = small_profile.plan(1, 3)
    assert built_ahead(whole, (0, 1), fewer, (0, 1), on_host=True) == {1: (Piece(1),)}
    assert built_ahead(whole, (0, 1), fewer, (0, 4), on_host=True) == {}
    # With another cut a rank builds also the layers that it keeps, and so does one from outside.
    alone = small_profile.plan(1, 1, 2, replicas=2, pipelines=1)
    assert built_ahead(now, members, alone, (0, 4, 2)) == {
        0: (Piece(0),),
        4: (Piece(1),),
        2: (Piece(2), Piece(3)),
    }
