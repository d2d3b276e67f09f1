"""A rank outside the group copies layers while others train, and gets its place with the same bits as theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job
from rank_group import RankGroup, parted, quiet_sha256, state_sha256
from test_freezing_training import METHODS
from test_standby import configured

from benchmarks.parts.configs import changed
from workers.config import WorkerConfig
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import CopyAhead, Request, StateSource
from workers.protocol.reports import CopiedAhead, StepReport, WarningReport

ENDLESS = 10_000
NEWCOMER = 2
NOWHERE = 1
"""A port at which nobody serves layers."""


class Joining:
    """Ranks 0 and 1 train; rank 2 copies layers of both, and then becomes the third."""

    def __init__(self, config: WorkerConfig, group: RankGroup, **about: object) -> None:
        self.group = group
        self.two = job(config, ranks=2, counts=(5, 3), **about)  # pyright: ignore[reportArgumentType]
        # The newcomer takes layers of both, and a copy of another one.
        three = job(config, ranks=3, counts=(2, 4, 2), **about)  # pyright: ignore[reportArgumentType]
        taken = (0, NEWCOMER, 1)
        plan = replace(three.plan, version=2, standbys=((), (1,), *[()] * 6))
        self.three = replace(three, plan=plan)
        self.members = taken
        self.layers = (1, 2, 3, 4, 5)
        self.homes = {number: (one.host, one.port) for number, one in group.each("position").items()}

    def source(self, layer: int) -> StateSource:
        rank = 0 if layer < 5 else 1
        host, port = self.homes[rank]
        return StateSource(layer=layer, rank=rank, host=host, port=port)

    def order(self, change: int = 1) -> CopyAhead:
        return CopyAhead(
            epoch=1,
            change=change,
            generation=self.group.generation,
            sources=tuple(self.source(layer) for layer in self.layers),
            freeze=self.two.freeze_plans,
            patience_s=60.0,
        )

    def copy(self, change: int = 1) -> CopiedAhead:
        self.group.wait_for(lambda reports: any(isinstance(one, StepReport) for one in reports))
        self.group.tell(NEWCOMER, "copy_ahead", self.order(change))
        self.group.wait_for(
            lambda reports: any(isinstance(one, CopiedAhead) and one.change == change for one in reports)
        )
        return self.group.of(CopiedAhead)[-1]

    def regroup(self) -> None:
        self.group.tell(0, "request", Request.REGROUP)

    def join(self, *, at_hand: bool, step: int, sources: list[StateSource]) -> dict[int, object]:
        """The next generation. `at_hand`: what the newcomer copied can be fetched nowhere."""
        if at_hand:
            sources = [replace(one, port=NOWHERE) if one.layer in self.layers[1:] else one for one in sources]
        return self.group.train(
            self.three,
            self.members,
            step=step,
            sources=[one for one in sources if one.rank != NEWCOMER],
            meanwhile=self.group.stop,
        )

    def finish_commit(self) -> tuple[int, list[StateSource]]:
        for number in self.group.alive:
            self.group.tell(number, "leave", self.group.generation)
        step, _, sources = self.group.finish_commit()
        return step, sources


@contextmanager
def joining(tmp_path: Path, case: str = "gpt") -> Iterator[tuple[Joining, LaunchedJob]]:
    config, about = configured(tmp_path, case)
    config = changed(config, steps=ENDLESS)
    with RankGroup(config, 3) as group:
        yield Joining(config, group, **about), job(config, **about)


@pytest.mark.parametrize("case", ["tied", "batchnorm", next(iter(METHODS))])
def test_a_newcomer_has_its_layers_at_hand_with_the_same_bits(tmp_path: Path, case: str) -> None:
    with joining(tmp_path, case) as (run, alone):

        def meanwhile() -> None:
            told = run.copy()
            assert (told.rank, told.layers, told.error) == (NEWCOMER, run.layers, None)
            assert told.bytes > 0
            run.regroup()

        (step,) = parted(run.group.train(run.two, (0, 1), meanwhile=meanwhile))
        reached, sources = run.finish_commit()
        assert reached == step
        ended = run.join(at_hand=True, step=step, sources=sources)
        assert state_sha256(ended) == quiet_sha256(alone, ended)
        assert not run.group.of(WarningReport)
