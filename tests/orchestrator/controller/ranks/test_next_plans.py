"""What becomes of orders to ranks that train, where a rank refuses them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from orchestrator.cluster.hosts import Hosts
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.next_plans import NextPlans
from orchestrator.events.types import Warned
from orchestrator.lifecycle.effects import CopyAside
from orchestrator.lifecycle.stimuli import Noted, Reported, Stimulus
from planner.shards import Piece
from workers.control.rank_error import RankError
from workers.protocol.reports import CopiedAhead


class Refusing:
    """Ranks that refuse whatever they are asked."""

    homes: dict[int, Any] = {}  # noqa: RUF012

    async def call(self, rank: int, name: str, *given: object) -> None:
        raise RankError("it ends")


def test_a_refused_order_to_copy_is_a_failed_copy_and_one_to_let_go_a_warning() -> None:
    posted: list[Stimulus] = []
    ranks = Refusing()
    plans = NextPlans(cast(Hosts, ranks), cast(LivingRanks, ranks), posted.append)
    effect = CopyAside(
        pieces={3: {Piece(1): 0}, 4: {}},
        building={},
        freeze=(),
        epoch=1,
        change=2,
        generation=1,
        patience_s=0.0,
    )
    asyncio.run(plans.copy_aside(effect))
    copying, letting_go = posted
    assert isinstance(copying, Reported)
    assert isinstance(copying.report, CopiedAhead)
    assert (copying.report.rank, copying.report.layers, copying.report.error) == (3, (1,), "it ends")
    assert letting_go == Noted(Warned(text="rank 4 keeps what it copied for a change of ranks: it ends"))
