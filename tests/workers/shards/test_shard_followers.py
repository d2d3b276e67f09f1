"""A rank outside the group follows the owners of shards, and finds what its place needs at hand: with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, quiet_sha256, state_sha256
from test_copies_ahead import ENDLESS, NOWHERE
from test_migration import cut
from test_shard_copies import copied
from test_shard_recovery import one_pipeline
from test_shared_states import shared

from planner.arrivals import built_ahead, needed
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import CopyAhead, Request, StateSource
from workers.protocol.reports import CopiedAhead, StepReport, WarningReport

NEWCOMER, PLACE = 4, 1


def following(name: str, four: LaunchedJob) -> tuple[LaunchedJob, tuple[int, ...]]:
    """The next generation, in which the newcomer has `PLACE`."""
    if name == "fewer":  # whole layers, put together from both shards
        return one_pipeline(four.config, 3), (0, NEWCOMER, 2)
    if name == "other cut":
        plan = replace(four.plan, layers=cut(four.plan, (3, 5)))
        return replace(four, plan=plan), (0, NEWCOMER, 2, 3)
    return four, (0, NEWCOMER, 2, 3)


@pytest.mark.parametrize(
    ("then", "trait", "precision"),
    [
        ("its place", "tied", "bfloat16"),
        ("its place", "batchnorm", "float32"),
        ("other cut", "fixed", "float16"),
        ("fewer", "dropout", "bfloat16"),
    ],
)
def test_a_newcomer_has_its_shards_at_hand_with_the_same_bits(
    tmp_path: Path, then: str, trait: str, precision: str
) -> None:
    config = drilled(small_config(tmp_path, trait, steps=ENDLESS, replicas=2, precision=precision))
    work = job(config, ranks=2, schedule="1f1b")
    four = copied(work) if then == "its place" else shared(work)
    after, members = following(then, four)
    pieces = needed(four.plan, after.plan, PLACE)
    with RankGroup(config, 5) as group:
        homes = {number: (one.host, one.port) for number, one in group.each("position").items()}
        sources = [
            StateSource(
                layer=piece.layer, shard=piece.shard, rank=owner, host=homes[owner][0], port=homes[owner][1]
            )
            for piece in pieces
            for owner in [four.plan.owner_of(piece)]
        ]

        def meanwhile() -> None:
            group.wait_for(lambda reports: any(isinstance(one, StepReport) for one in reports))
            order = CopyAhead(
                epoch=1,
                change=1,
                generation=group.generation,
                sources=tuple(sources),
                building=built_ahead(four.plan, range(4), after.plan, members).get(NEWCOMER, ()),
                patience_s=60.0,
            )
            group.tell(NEWCOMER, "copy_ahead", order)
            group.wait_for(lambda _: bool(group.of(CopiedAhead)))
            group.tell(0, "request", Request.REGROUP)

        (step,) = parted(group.train(four, range(4), meanwhile=meanwhile))
        (told,) = group.of(CopiedAhead)
        assert (told.rank, told.error) == (NEWCOMER, None)
        assert told.layers == tuple(sorted({piece.layer for piece in pieces}))
        carried = group.each("position")[0].carried
        for number in group.alive:
            group.tell(number, "leave", group.generation)
        reached, _, offered = group.finish_commit()
        assert reached == step
        # What it copied can be fetched nowhere.
        offered = [
            replace(one, port=NOWHERE) if one.piece in pieces else one
            for one in offered
            if one.rank != NEWCOMER
        ]
        ended = group.train(after, members, step=step, sources=offered, carried=carried, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config), ended)
        skipped = "changed no weight"
        assert [warned for warned in group.of(WarningReport) if skipped not in warned.text] == []
