"""Whether a rank can follow another plan: with the pieces that it has, and the modules that it builds first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import pytest

from planner.rank_program import rank_programs
from planner.schedule.registry import build
from planner.search.unmeasured import unmeasured_plan
from planner.shards import Piece, Shard
from workers.commit.next_plan import NextPlan, check_next
from workers.protocol.errors import JobError

SCHEDULE = build("1f1b", 2, 4)
PROGRAM = rank_programs(SCHEDULE)[1]
NOW = replace(unmeasured_plan(SCHEDULE, (1,) * 4, replicas=2), shard="optimizer")
THEN = replace(NOW, version=NOW.version + 1, layers=((0, 1), (1, 4)))
"""Layer 1 comes to places 1 and 3, which own layers 2 and 3."""


def piece(layer: int, number: int = 0) -> Piece:
    return Piece(layer, Shard(number, 2))


def test_a_copy_of_another_shard_of_the_layer_makes_nobody_ready() -> None:
    following, owned = NextPlan(THEN, PROGRAM), NOW.pieces_of_place(1)
    assert owned == (piece(2), piece(3))
    assert not following.ready(1, owned, (), ())
    assert not following.ready(1, owned, {piece(1, 1)}, ())
    assert not following.ready(1, owned, (), {piece(1)})
    assert following.ready(1, owned, {piece(1)}, {piece(1, 1)})
    kept = replace(THEN, standbys=((), (), (), (1,), *((),) * 4))
    assert not NextPlan(kept, PROGRAM).ready(1, owned, {piece(1)}, {piece(1, 1)})
    assert NextPlan(kept, PROGRAM).bases(NOW) == {piece(1, 1)}


def test_a_rank_builds_the_modules_of_shards_that_it_takes_over() -> None:
    owned = NOW.pieces_of_place(1)
    assert NextPlan(THEN, PROGRAM).modules(1, owned) == {piece(1)}
    assert NextPlan(NOW, PROGRAM).modules(1, owned) == frozenset()
    # Copies of whole layers have theirs.
    whole = replace(THEN, shard="none")
    assert NextPlan(whole, PROGRAM).modules(1, replace(NOW, shard="none").pieces_of_place(1)) == frozenset()


def test_states_cut_otherwise_take_another_generation() -> None:
    check_next(THEN, PROGRAM, NOW, 1)
    with pytest.raises(JobError, match=r"has 1 shards of each layer, the one in force 2: that takes a new"):
        check_next(replace(THEN, shard="none"), PROGRAM, NOW, 1)


def test_the_digest_of_a_plan_is_that_of_earlier_versions() -> None:
    kept = replace(THEN, predicted_bubble=1e-05, reason="über")
    said = f"{json.dumps(asdict(kept), sort_keys=True)}\n{PROGRAM.schedule_sha256}\n()"
    assert NextPlan(kept, PROGRAM).key == (*kept.key, hashlib.sha256(said.encode()).hexdigest())
