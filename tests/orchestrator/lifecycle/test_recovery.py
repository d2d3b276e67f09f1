"""What is decided after a loss, case by case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_jobs import plan_of, position

from orchestrator.lifecycle.recovery import (
    Abort,
    Handover,
    PauseDecided,
    RecoveryPlan,
    Rescue,
    Situation,
    decide,
)
from planner.shards import WHOLE, Piece, Shard
from workers.config import ElasticConfig
from workers.control.records_digest import vector_sha256
from workers.protocol.carried import Carried
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.loss_scale import LossScale
from workers.protocol.orders import CheckpointRef, CommitOutcome, StatePart, StateSource
from workers.protocol.reports import RankPosition, SnapshotHeld

LAYERS = 6


def at(rank: int, step: int, *holds: int | Piece, **changes: object) -> RankPosition:
    return position(rank, step, holds, host="h", port=rank, **changes)  # pyright: ignore[reportArgumentType]


def situation(*positions: RankPosition, **changes: object) -> Situation:
    fields = {
        "plan": plan_of(3, LAYERS),
        "members": (0, 1, 2),
        "positions": {position.rank: position for position in positions},
        "step": 4,
        "wanted": 3,
        "trouble": "rank 1: died",
        **changes,
    }
    return Situation(**fields)  # pyright: ignore[reportArgumentType]


KNOWN = {"step": 5, "vector_sha256": vector_sha256((b"a", b"b", b"c"))}
"""A position after the commit of step 5, with its records."""


@pytest.mark.parametrize(
    ("first", "last", "step", "lacking", "rerun"),
    [
        # Lost before the commit, which no rank reached.
        ({"began": 5}, {"began": 5}, 4, (), 1),
        ({"began": 5}, {}, 4, (), 1),
        # Lost in the commit, and no surviving rank knows the outcome.
        ({"began": 5, "undecided": 5}, {"began": 5, "undecided": 5}, 4, (), 1),
        ({"began": 5, "undecided": 5}, {"began": 5}, 4, (), 1),
        # Lost in the commit, and one survivor has committed.
        ({**KNOWN, "began": 5}, {"began": 5, "undecided": 5}, 5, (2,), 0),
        # Lost after the commit: both have committed, and the next step may have begun.
        ({**KNOWN, "began": 6}, {**KNOWN, "began": 5}, 5, (), 1),
        ({**KNOWN, "began": 5}, {**KNOWN, "began": 5}, 5, (), 0),
    ],
)
def test_the_commit_is_finished_one_way(
    first: dict[str, object], last: dict[str, object], step: int, lacking: tuple[int, ...], rerun: int
) -> None:
    recovery_plan = decide(
        situation(replace(at(0, 4, 0, 1, 2), **first), replace(at(2, 4, 2, 3, 4, 5), **last))  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.rerun) == (step, rerun)
    assert recovery_plan.commit_outcome == CommitOutcome(step=step, reported=4)
    sha256 = str(KNOWN["vector_sha256"])
    handover = Handover(holder=0, vector_sha256=sha256, lacking=frozenset(lacking)) if lacking else None
    assert recovery_plan.handover == handover
    assert recovery_plan.finishing == {0, 2}
    assert recovery_plan.cause == "loss"
    assert recovery_plan.lost == (1,)


def test_one_of_those_that_have_the_records_sends_them() -> None:
    held = [replace(at(rank, 5, 0, 1, 2), vector_sha256="a") for rank in (0, 2)]
    undecided = replace(at(3, 4, 3, 4, 5), undecided=5)
    now = replace(situation(*held, undecided), members=(0, 1, 2, 3))
    recovery_plan = decide(now)
    assert isinstance(recovery_plan, RecoveryPlan)
    assert recovery_plan.handover == Handover(holder=0, vector_sha256="a", lacking=frozenset({3}))
    # That one dies before it has sent them: another one is asked.
    again = decide(replace(now, positions={2: held[1], 3: undecided}))
    assert isinstance(again, RecoveryPlan)
    assert again.handover == Handover(holder=2, vector_sha256="a", lacking=frozenset({3}))
    # All that had them are gone: the others roll back.
    last = decide(replace(now, positions={3: replace(undecided, holds=tuple(map(Piece, range(6))))}))
    assert isinstance(last, RecoveryPlan)
    assert (last.step, last.handover) == (4, None)


def test_records_of_a_rank_outside_the_generation_do_not_count() -> None:
    """It stayed aside with a step that was undone since."""
    undecided = replace(at(0, 4, 0, 1, 2, 3, 4, 5), undecided=5)
    recovery_plan = decide(situation(undecided, replace(at(7, 5), vector_sha256="of another commit")))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.handover) == (4, None)


def test_the_loss_scale_is_that_of_a_rank_that_has_applied_the_commit() -> None:
    """The others go on from it, also where none of them took part."""
    new, old = (Carried(loss_scale=LossScale(value=value)) for value in (4.0, 8.0))
    applied = replace(at(0, 5, 0, 1, 2), vector_sha256="a", carried=new)
    undecided = replace(at(2, 4, 3, 4, 5), undecided=5, carried=old)
    fresh = at(7, 0)
    for positions in ((applied, undecided, fresh), (fresh, undecided, applied)):
        recovery_plan = decide(situation(*positions))
        assert isinstance(recovery_plan, RecoveryPlan)
        assert (recovery_plan.step, recovery_plan.carried) == (5, new)
    aside = replace(at(7, 5), vector_sha256="of another commit", carried=new)
    alone = replace(undecided, holds=tuple(map(Piece, range(6))))
    recovery_plan = decide(situation(alone, aside))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.carried) == (4, old)


def test_different_records_of_one_commit_end_the_job() -> None:
    ranks = [replace(at(0, 5, 0, 1, 2), vector_sha256="a"), replace(at(2, 5, 3, 4, 5), vector_sha256="b")]
    refused = decide(situation(*ranks))
    assert isinstance(refused, Abort)
    assert "ranks 0 and 2 hold different records of the commit of step 5" in refused.reason
    assert refused.rescue is None


def test_a_layer_comes_from_its_owner_then_from_a_standby_that_gives_least() -> None:
    recovery_plan = decide(situation(at(0, 4, 0, 1, 2, 3, 4), at(2, 4, 0, 2, 3, 4, 5)))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert [(source.layer, source.rank) for source in recovery_plan.sources] == [
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    assert recovery_plan.sources[0] == StateSource(layer=0, rank=0, host="h", port=0)


def test_those_who_began_a_checkpoint_go_on_from_it_when_they_hold_all_of_it() -> None:
    checkpoints = (CheckpointRef(path="2", step=2),)
    recovery_plan = decide(
        situation(
            at(0, 2, 0, 1, 2),
            at(2, 2, 3, 4, 5),
            at(3, 4, 5),
            checkpoints=checkpoints,
            step=4,
            tried=frozenset({3}),
        )
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.checkpoints, recovery_plan.reached) == (2, (), 4)


def test_an_older_state_than_the_newest_checkpoint_is_not_gone_back_to() -> None:
    checkpoints = (CheckpointRef(path="3", step=3), CheckpointRef(path="2", step=2))
    recovery_plan = decide(
        situation(
            at(0, 2, 0, 1, 2),
            at(2, 2, 3, 4, 5),
            at(3, 4, 5),
            checkpoints=checkpoints,
            step=4,
            tried=frozenset({3}),
        )
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.checkpoints, recovery_plan.sources) == (3, checkpoints, ())


def kept(step: int, *layers: int, carried: Carried | None = None) -> SnapshotHeld:
    return SnapshotHeld(step=step, pieces=tuple(map(Piece, layers)), carried=carried)


def test_where_layers_are_lost_all_go_back_to_the_newest_snapshot_that_is_whole() -> None:
    carried = Carried(loss_scale=LossScale())
    now = situation(
        at(0, 12, 0, 1, began=13, snapshots=(kept(10, 0, 1), kept(5, 0, 1, 4, 5, carried=carried))),
        at(2, 12, 4, 5, began=13, snapshots=(kept(10, 4, 5, 2), kept(5, 4, 5, 2, 3))),
        step=12,
        checkpoints=(CheckpointRef(path="4", step=4),),
    )
    found = decide(now)
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.goes_back, found.goes_on, found.checkpoints) == (5, True, False, ())
    assert (found.reached, found.commit_outcome) == (12, CommitOutcome(step=12, reported=12))
    assert found.finishing == {0, 2}
    assert found.carried == carried
    assert found.held == {0: tuple(map(Piece, (0, 1, 4, 5))), 2: tuple(map(Piece, (4, 5, 2, 3)))}
    assert [(each.layer, each.rank) for each in found.sources] == [
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    assert "back to the snapshot of step 5, which costs 7 committed steps" in found.reason


def test_a_newer_checkpoint_or_the_layers_as_they_are_count_more_than_a_snapshot() -> None:
    snapshots = (kept(5, *range(LAYERS)),)
    alive = situation(
        at(0, 12, 0, 1, 2, snapshots=snapshots), at(2, 12, 3, 4, 5, snapshots=snapshots), step=12
    )
    goes_on = decide(alive)
    assert isinstance(goes_on, RecoveryPlan)
    assert (goes_on.step, goes_on.goes_back, goes_on.goes_on) == (12, False, True)
    checkpoints = (CheckpointRef(path="6", step=6),)
    lost = situation(at(0, 12, 0, 1, snapshots=snapshots), step=12, checkpoints=checkpoints)
    back = decide(lost)
    assert isinstance(back, RecoveryPlan)
    assert (back.step, back.goes_back, back.checkpoints, back.sources) == (6, False, checkpoints, ())
    (older,) = lost.checkpoints
    same = decide(replace(lost, checkpoints=(replace(older, step=5),)))
    assert isinstance(same, RecoveryPlan)
    assert (same.step, same.goes_back) == (5, True)


def test_a_loss_while_ranks_go_back_does_not_make_the_steps_good_again() -> None:
    """They stand at the snapshot's step by then, with all layers."""
    found = decide(situation(at(0, 5, 0, 1, 2), at(2, 5, 3, 4, 5), step=12, trained=True))
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.reached, found.goes_on, found.goes_back) == (5, 12, False, True)
    assert "back to step 5, the newest of which all is left, which costs 7 committed steps" in found.reason


def test_a_snapshot_of_the_newest_step_undoes_none() -> None:
    held = kept(12, *range(LAYERS))
    found = decide(situation(at(0, 12, 0, 1, snapshots=(held,)), at(2, 12, 4, 5, snapshots=(held,)), step=12))
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.goes_on, found.goes_back) == (12, True, False)
    assert "back to" not in found.reason
    assert "weights" not in found.reason


def test_snapshots_of_a_rank_outside_the_generation_do_not_count() -> None:
    """They may be of steps that were undone since."""
    now = situation(
        at(0, 12, 0, 1, snapshots=(kept(5, 0, 1, 4, 5),)),
        at(3, 9, snapshots=(kept(5, 2, 3), kept(8, *range(LAYERS)))),
        step=12,
        tried=frozenset({3}),
    )
    found = decide(now)
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.sources) == (0, ())


def test_a_snapshot_is_written_before_the_ranks_that_hold_it_may_go() -> None:
    few = situation(
        at(0, 12, 0, 1, began=13, snapshots=(kept(10, *range(LAYERS)),)),
        step=12,
        elastic=ElasticConfig(min_ranks=2),
    )
    paused = decide(few)
    assert isinstance(paused, PauseDecided)
    assert paused.step == 10
    assert "back to the snapshot of step 10, which costs 2 committed steps" in paused.reason
    assert paused.rescue == Rescue(
        step=10,
        finishing=frozenset({0}),
        commit_outcome=CommitOutcome(step=12, reported=12),
        layers={0: tuple(range(LAYERS))},
    )
    written = decide(replace(few, checkpoints=(CheckpointRef(path="10", step=10),)))
    assert isinstance(written, PauseDecided)
    assert written.rescue is None


def test_newcomers_take_the_lost_places_and_no_more_than_are_wanted() -> None:
    recovery_plan = decide(situation(at(0, 4, 0, 1, 2), at(2, 4, 3, 4, 5), at(7, 0), at(8, 0)))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.lineup, recovery_plan.joined, recovery_plan.keep_plan) == ((0, 7, 2), (7,), False)
    assert recovery_plan.reason == "rank 1: died; rank 7 comes in; 3 ranks go on where there were 3"


def test_who_goes_still_gives_what_it_holds() -> None:
    recovery_plan = decide(
        situation(at(0, 4, 0, 1), at(1, 4, 2, 3), at(2, 4, 4, 5), going=frozenset({1}), asked="drain")
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.cause, recovery_plan.lineup, recovery_plan.lost) == ("drain", (0, 2), (1,))
    assert {source.rank for source in recovery_plan.sources} == {0, 1, 2}


def test_too_few_ranks_and_no_time_to_wait_is_the_end() -> None:
    few = situation(at(0, 4, *range(LAYERS), began=5), elastic=ElasticConfig(min_ranks=2))
    whole = Rescue(
        step=4,
        finishing=frozenset({0}),
        commit_outcome=CommitOutcome(step=4, reported=4),
        layers={0: tuple(range(LAYERS))},
    )
    assert decide(few) == PauseDecided(
        reason="rank 1: died: 1 rank left, and elastic.min_ranks = 2",
        step=4,
        rescue=whole,
        interrupted=True,
        failures=1,
    )
    in_checkpoint = replace(few, checkpoints=(CheckpointRef(path="4", step=4),))
    held = decide(in_checkpoint)
    assert isinstance(held, PauseDecided)
    assert held.rescue is None
    told = decide(replace(few, elastic=ElasticConfig(min_ranks=2, wait_s=0)))
    assert isinstance(told, Abort)
    assert told.rescue == whole
    assert "elastic.wait_s = 0" in told.reason


def test_a_step_that_keeps_failing_ends_the_job_whoever_dies() -> None:
    dead = situation(at(0, 4, 0, 1, 2, 3), at(2, 4, 3, 4, 5), elastic=ElasticConfig(attempts=3))
    first = decide(dead)
    assert isinstance(first, RecoveryPlan)
    assert first.failures == 1
    last = decide(replace(dead, failures=2, failed_at=4))
    assert isinstance(last, Abort)
    assert last.reason == (
        "rank 1: died; 3 failures with no step committed beyond step 4 (elastic.attempts = 3)"
    )
    assert last.rescue is not None
    before_that = decide(replace(dead, failures=2, failed_at=9))
    assert isinstance(before_that, Abort), "steps that are run again are not new ones"
    further = decide(replace(dead, failures=2, failed_at=3))
    assert isinstance(further, RecoveryPlan)
    assert further.failures == 1


def test_a_requested_regroup_neither_counts_as_a_failure_nor_clears_the_count() -> None:
    joining = situation(*(at(rank, 4, *range(LAYERS)) for rank in range(3)), asked="join", trouble="")
    plan = decide(replace(joining, failures=2, failed_at=4))
    assert isinstance(plan, RecoveryPlan)
    assert plan.failures == 2


SALVAGE = ElasticConfig(salvage="weights")
AT_2 = (CheckpointRef(path="2", step=2),)


def left_of_a_drain(**changes: object) -> Situation:
    """Before rank 1 died it sent weights of its layers 2 and 3 to rank 2, and all of layer 2 to rank 0."""
    fields = {"elastic": SALVAGE, "checkpoints": AT_2, **changes}
    return situation(at(0, 4, 0, 1, 2), at(2, 4, 4, 5, weights=(2, 3)), **fields)


def test_layers_of_which_only_weights_are_left_go_on_if_the_job_says_so() -> None:
    recovery_plan = decide(left_of_a_drain())
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.checkpoints, recovery_plan.moments, recovery_plan.reached) == (
        4,
        (),
        AT_2,
        4,
    )
    assert [(source.layer, source.rank, source.part) for source in recovery_plan.sources] == [
        (0, 0, StatePart.ALL),
        (1, 0, StatePart.ALL),
        (2, 0, StatePart.ALL),
        (3, 2, StatePart.WEIGHTS),
        (4, 2, StatePart.ALL),
        (5, 2, StatePart.ALL),
    ]
    assert recovery_plan.reason == (
        "rank 1: died; 2 ranks go on where there were 3; only the weights are left of layer 3: training continues"
        " with the moments of the checkpoint of step 2, and ends with other bits than without the failure"
        ' (elastic.salvage = "weights")'
    )
    fresh = decide(left_of_a_drain(checkpoints=()))
    assert isinstance(fresh, RecoveryPlan)
    assert (fresh.step, fresh.moments) == (4, ())
    assert "training continues with fresh moments" in fresh.reason


def test_weights_alone_count_for_nothing_otherwise() -> None:
    recovery_plan = decide(left_of_a_drain(elastic=ElasticConfig()))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.checkpoints, recovery_plan.moments, recovery_plan.sources) == (
        2,
        AT_2,
        (),
        (),
    )
    assert "no remaining rank holds layer 3: back to the checkpoint of step 2" in recovery_plan.reason


@pytest.mark.parametrize("of", ["this step", "a later one"])
def test_a_checkpoint_that_is_no_older_is_better_than_weights(of: str) -> None:
    checkpoints = (CheckpointRef(path="new", step=4 if of == "this step" else 5),)
    recovery_plan = decide(left_of_a_drain(checkpoints=checkpoints))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.checkpoints, recovery_plan.sources) == (
        checkpoints[0].step,
        checkpoints,
        (),
    )


def test_weights_of_all_that_is_missing_or_back_to_the_checkpoint() -> None:
    recovery_plan = decide(
        situation(at(0, 4, 0, 1), at(2, 4, 4, 5, weights=(3,)), elastic=SALVAGE, checkpoints=AT_2)
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.moments, recovery_plan.sources) == (2, (), ())
    assert "no remaining rank holds layers 2, 3: back" in recovery_plan.reason


def test_what_is_whole_at_an_older_step_is_better_than_newer_weights() -> None:
    """The job loses only the steps since then, and its bits stay the same."""
    recovery_plan = decide(
        situation(
            at(0, 4, 0, 1, 2),
            at(2, 4, 4, 5, weights=(3,)),
            at(3, 3, *range(LAYERS)),
            elastic=SALVAGE,
            tried=frozenset({3}),
        )
    )
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, {source.rank for source in recovery_plan.sources}) == (3, {3})


def test_who_was_left_aside_holds_nothing_that_counts() -> None:
    """Rank 3 took part in an attempt long ago; since then the job has gone back and trained further."""
    left = at(3, 9, *range(LAYERS))
    recovery_plan = decide(situation(at(0, 4, 0, 1, 2), at(2, 4, 3, 4, 5), left))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert (recovery_plan.step, recovery_plan.reached, recovery_plan.finishing) == (4, 4, frozenset({0, 2}))
    assert recovery_plan.lineup == (0, 3, 2)
    short = decide(situation(at(0, 4, 0, 1, 2), at(2, 4, 4, 5), left, checkpoints=AT_2))
    assert isinstance(short, RecoveryPlan)
    assert (short.step, short.reached, short.finishing) == (2, 4, frozenset({0, 2}))
    assert "no remaining rank holds layer 3: back to the checkpoint of step 2, which costs 2" in short.reason


def test_before_the_first_step_nothing_is_said_of_what_is_missing() -> None:
    recovery_plan = decide(situation(at(0, 0), at(2, 0), step=0, trained=False))
    assert isinstance(recovery_plan, RecoveryPlan)
    assert recovery_plan.reason == "rank 1: died; 2 ranks go on where there were 3"


def shards(layer: int, of: int) -> list[Piece]:
    return [Piece(layer, Shard(number, of)) for number in range(of)]


def made_up(held: Iterable[Piece], layers: int) -> bool:
    """Whether every layer is there in one piece or in all shards of one cut."""
    there = {*held}
    return all(any(there.issuperset(shards(layer, of)) for of in (1, 2, 3)) for layer in range(layers))


PIECES = [piece for layer in range(2) for of in (1, 2, 3) for piece in shards(layer, of)]


@given(st.lists(st.tuples(st.frozensets(st.sampled_from(PIECES), max_size=9), st.integers(0, 2)), max_size=4))
def test_shards_of_one_step_that_make_up_the_layers_are_gone_on_from(
    ranks: list[tuple[frozenset[Piece], int]],
) -> None:
    """Each rank stands at step 3, at step 4, or is undecided of step 4."""
    steps = {0: {"step": 3}, 1: {"step": 4, "vector_sha256": "a"}, 2: {"step": 3, "undecided": 4}}
    positions = [replace(at(n, 0, *held), **steps[how]) for n, (held, how) in enumerate(ranks)]  # pyright: ignore[reportArgumentType]
    plan = replace(plan_of(1, 2), replicas=3, shard="optimizer")
    now = situation(*positions, plan=plan, members=(0, 1, 2, 3), step=3, wanted=4, trouble="rank 9: died")
    done = any(how == 1 for _, how in ranks)
    at_step = {
        4: [n for n, (_, how) in enumerate(ranks) if how == 1 or (how == 2 and done)],
        3: [n for n, (_, how) in enumerate(ranks) if how == 0 or (how == 2)],
    }
    due = next((s for s in (4, 3) if made_up((p for n in at_step[s] for p in ranks[n][0]), 2)), None)
    decision = decide(now)
    if not ranks:
        assert isinstance(decision, PauseDecided)
        return
    assert isinstance(decision, RecoveryPlan)
    if due is None:
        assert (decision.step, decision.sources) == (0, ())
        assert "no remaining rank holds" in decision.reason
        return
    assert decision.step == due
    assert made_up((source.piece for source in decision.sources), 2)
    assert len({source.piece for source in decision.sources}) == len(decision.sources)
    for source in decision.sources:
        assert source.rank in at_step[due]
        assert source.piece in ranks[source.rank][0]
    for layer in range(2):
        assert len({source.shard.of for source in decision.sources if source.layer == layer}) == 1


@given(
    st.lists(
        st.tuples(
            st.frozensets(st.sampled_from(PIECES), max_size=6),
            st.frozensets(st.sampled_from(PIECES), max_size=6),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_weights_of_shards_fill_in_where_nothing_complete_is_left(
    ranks: list[tuple[frozenset[Piece], frozenset[Piece], int]],
) -> None:
    """Each rank stands at step 3, at step 4, or is undecided of step 4."""
    steps = {0: {"step": 3}, 1: {"step": 4, "vector_sha256": "a"}, 2: {"step": 3, "undecided": 4}}
    positions = [
        replace(at(n, 0, *held, weights=weights), **steps[how])  # pyright: ignore[reportArgumentType]
        for n, (held, weights, how) in enumerate(ranks)
    ]
    now = situation(
        *positions,
        plan=replace(plan_of(1, 2), replicas=3, shard="optimizer"),
        members=(0, 1, 2, 3),
        step=3,
        wanted=4,
        elastic=SALVAGE,
    )
    done = any(how == 1 for *_, how in ranks)
    at_step = {
        4: [n for n, (*_, how) in enumerate(ranks) if how == 1 or (how == 2 and done)],
        3: [n for n, (*_, how) in enumerate(ranks) if how != 1],
    }

    def there(step: int, *, weights: bool) -> set[Piece]:
        """An undecided rank has no weights of step 4."""
        found = {piece for n in at_step[step] for piece in ranks[n][0]}
        having = [n for n in at_step[step] if weights and steps[ranks[n][2]]["step"] == step]
        return found.union(*(ranks[n][1] for n in having))

    decision = decide(now)
    assert isinstance(decision, RecoveryPlan)
    lost = {source.piece for source in decision.sources if source.part is StatePart.WEIGHTS}
    whole = next((step for step in (4, 3) if made_up(there(step, weights=False), 2)), None)
    left = next((step for step in (4, 3) if made_up(there(step, weights=True), 2)), None)
    assert ("only the weights are left" in decision.reason) == bool(lost)
    assert "snapshot" not in decision.reason
    if whole is not None or left is None:
        assert (decision.step, decision.moments, lost) == (whole or 0, (), set())
        return
    assert decision.step == left
    for source in decision.sources:
        held, weights, how = ranks[source.rank]
        assert source.rank in at_step[left]
        assert source.part is StatePart.ALL or steps[how]["step"] == left
        assert source.piece in (weights if source.part is StatePart.WEIGHTS else held)
        assert source.part is StatePart.ALL or source.piece not in there(left, weights=False)
    for layer in range(2):
        made = [source.piece for source in decision.sources if source.layer == layer]
        assert made == shards(layer, len(made))
        others = [
            sum(piece not in there(left, weights=False) for piece in shards(layer, of)) / of
            for of in (1, 2, 3)
            if there(left, weights=True).issuperset(shards(layer, of))
        ]
        assert len(lost.intersection(made)) / len(made) == min(others)


def test_shards_of_which_only_weights_are_left_go_on_if_the_job_says_so() -> None:
    """Rank 1 sent the weights of its shards, and the moments of one; then it died."""
    first, second = ([Piece(layer, Shard(number, 2)) for layer in range(3)] for number in range(2))
    plan = replace(plan_of(1, 3), replicas=2, shard="optimizer")
    now = situation(
        at(0, 4, *first, second[1], weights=[second[0], second[2]]),
        plan=plan,
        members=(0, 1),
        wanted=2,
        elastic=SALVAGE,
        checkpoints=AT_2,
    )
    found = decide(now)
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.checkpoints, found.moments, found.goes_on) == (4, (), AT_2, True)
    assert [source.piece for source in found.sources] == sorted([*first, *second])
    lost = {source.piece for source in found.sources if source.part is StatePart.WEIGHTS}
    assert lost == {second[0], second[2]}
    assert (
        "only the weights are left of shards of layers 0, 2: training continues with the moments of the checkpoint"
        " of step 2" in found.reason
    )
    without = decide(replace(now, elastic=ElasticConfig()))
    assert isinstance(without, RecoveryPlan)
    assert (without.step, without.checkpoints, without.sources) == (2, AT_2, ())


def test_a_shard_comes_from_its_owner_then_from_whoever_gives_least() -> None:
    plan = replace(plan_of(1, 2), replicas=2, shard="optimizer")
    first, second = Shard(0, 2), Shard(1, 2)
    both = [
        at(0, 4, Piece(0, first), Piece(1, first), Piece(0, second)),
        at(1, 4, Piece(0, second), Piece(1, second), Piece(1, first)),
    ]
    found = decide(situation(*both, plan=plan, members=(0, 1), wanted=2))
    assert isinstance(found, RecoveryPlan)
    owners = [(0, first, 0), (0, second, 1), (1, first, 0), (1, second, 1)]
    assert [(each.layer, each.shard, each.rank) for each in found.sources] == owners
    left = decide(situation(both[0], at(7, 0), plan=plan, members=(0, 1), wanted=2, step=4))
    assert isinstance(left, RecoveryPlan)
    assert "no remaining rank holds layer 1: back to the beginning" in left.reason


def test_a_layer_in_shards_is_written_by_the_rank_of_one_of_them() -> None:
    plan = replace(plan_of(1, 3), replicas=2, shard="optimizer")
    held = [[Piece(layer, Shard(number, 2)) for layer in range(3)] for number in range(2)]
    now = situation(
        at(0, 4, *held[0], Piece(1, WHOLE)),
        at(1, 4, *held[1]),
        plan=plan,
        members=(0, 1),
        elastic=ElasticConfig(min_ranks=3),
    )
    paused = decide(now)
    assert isinstance(paused, PauseDecided)
    assert paused.rescue is not None
    # Layer 1 is there in one piece.
    assert paused.rescue.layers == {0: (0, 1, 2)}
    assert [source.piece for source in paused.rescue.sources] == [*shards(0, 2), *shards(2, 2)]
    cut = decide(replace(now, positions={n: at(n, 4, *held[n]) for n in range(2)}))
    assert isinstance(cut, PauseDecided)
    assert cut.rescue is not None
    assert cut.rescue.layers == {0: (0, 2), 1: (1,)}


@pytest.mark.parametrize(("layers", "kept"), [(5, True), (4, True), (3, False), (None, True)])
def test_a_plan_that_drops_backward_passes_is_kept_while_its_layers_are_frozen(
    layers: int | None, kept: bool
) -> None:
    carried = None if layers is None else Carried(prefix=FrozenPrefix(layers=layers))
    where = (at(rank, 4, 2 * rank, 2 * rank + 1, carried=carried) for rank in range(3))
    plan = plan_of(3, LAYERS, frozen=4)
    found = decide(situation(*where, plan=plan, asked="move", trouble=""))
    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.keep_plan) == (4, kept)


def test_it_is_not_kept_for_an_earlier_step_whose_prefix_nobody_knows() -> None:
    where = [at(rank, 4, 0) for rank in range(3)]
    for frozen in (0, 4):
        plan = plan_of(3, LAYERS, frozen=frozen)
        found = decide(situation(*where, plan=plan, checkpoints=(CheckpointRef(path="/2", step=2),)))
        assert isinstance(found, RecoveryPlan)
        assert (found.step, found.keep_plan) == (2, not frozen)
