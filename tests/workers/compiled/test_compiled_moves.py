"""Compiled layers change ranks while training goes on, and a rank is lost: the same bits, and no step compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import RankGroup, quiet_sha256, state_sha256, with_standbys
from test_migration import ENDLESS, follow, moving

from workers.config import ModelConfig
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport, SwitchReport


@pytest.mark.soak
def test_layers_move_and_are_fetched_with_the_same_bits(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        microbatch_size=3,
        steps=ENDLESS,
        compile=True,
        model=ModelConfig(factory="compiled_models:model"),
    )
    two = job(config, ranks=2, schedule="zb-h1", counts=(2, 3), layers=5)
    with RankGroup(config, 3) as group:

        def move() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            copying, taking = moving(two, (4, 1))
            follow(group, two, range(2), copying)
            follow(group, two, range(2), taking)
            group.stop()

        ended = group.train(two, range(2), meanwhile=move)
        switches: list[SwitchReport] = group.of(SwitchReport)
        assert {(s.rank, s.taken) for s in switches if s.taken} == {(0, (2, 3))}
        assert state_sha256(ended) == quiet_sha256(job(config, layers=5), ended)
        # Another rank takes a place: it fetches layers and compiles them before it trains.
        step, _, sources = group.finish_commit()
        group.tell(2, "request", Request.STOP)
        again = group.train(two, (0, 2), plan=with_standbys(two), step=step, sources=sources)
        assert state_sha256(again) == quiet_sha256(job(config, layers=5), again)
        assert not [text for _, text in group.logged if "while it trains" in text]
