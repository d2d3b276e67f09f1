"""Has idle ranks finish an interrupted commit: those that lack its records get them.

Also has them write a checkpoint of what only they hold, before they may fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from orchestrator.cluster.hosts import Hosts, RankGone
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.ranks.calls import RankCalls
from orchestrator.lifecycle.effects import FinishCommit, Save
from orchestrator.lifecycle.recovery import Handover
from orchestrator.lifecycle.stimuli import CommitFinished, Reported, Stimulus
from workers.checkpoint.manifest import FileRecord, checkpoint_folder
from workers.control.rank_error import RankError
from workers.control.records_digest import vector_sha256
from workers.protocol.orders import CommitOutcome
from workers.protocol.reports import CheckpointReport

Vector = tuple[bytes, ...]
"""All ranks' records of one commit."""


@dataclass(eq=False, repr=False)
class InterruptedCommits:
    """The commits at which generations of one job ended."""

    _setup: ControllerConfig
    _hosts: Hosts
    _calls: RankCalls
    _post: Callable[[Stimulus], None]
    """Takes what comes of it."""

    async def finish(self, effect: FinishCommit) -> None:
        """Have the ranks finish it; first get the records that some of them lack from one that has them."""
        handover, number = effect.handover, effect.round
        vector: Vector | None = None
        if handover is not None:
            got = await self._calls.answer(
                handover.holder, self._records(handover), "send the records of its commit", number
            )
            if got is None:
                return
            vector = got[0]
        told = _outcomes(effect.ranks, effect.commit_outcome, handover, vector)
        await self._calls.each(
            {rank: ("finish_commit", commit_outcome) for rank, commit_outcome in told.items()},
            lambda rank, _: CommitFinished(rank, number),
            "finish its commit",
            number,
        )

    async def save(self, effect: Save) -> None:
        """Have idle ranks write a checkpoint of what they hold, and report the result."""
        rescue, config = effect.rescue, self._setup.config
        begun_s = time.monotonic()
        path = checkpoint_folder(config.job.folder, rescue.step, effect.generation)
        error: str | None = None
        records: list[FileRecord] = []
        try:
            async with asyncio.timeout(self._setup.config.cluster.timeout_s):
                vector = await self._records(rescue.handover)
                told = _outcomes(rescue.finishing, rescue.commit_outcome, rescue.handover, vector)
                await asyncio.gather(
                    *(self._hosts.call(rank, "finish_commit", each) for rank, each in told.items())
                )
                writing = (
                    self._hosts.call(rank, "save", path, rescue.step, layers, rescue.sources)
                    for rank, layers in rescue.layers.items()
                )
                for written in await asyncio.gather(*writing):
                    records += written
                first, plan = min(rescue.layers), effect.plan
                await self._hosts.call(first, "seal", path, rescue.step, plan, effect.generation, records)
        except TimeoutError:
            error = f"was not written within {self._setup.config.cluster.timeout_s:g} s (cluster.timeout_s)"
        except RankGone as failure:
            error = f"a rank's process died: {failure}"
        except RankError as failure:
            error = str(failure)
        report = CheckpointReport(
            step=rescue.step,
            path=path,
            bytes=sum(record.written_bytes for record in records) if error is None else 0,
            seconds=time.monotonic() - begun_s,
            error=error,
        )
        self._post(Reported(report))

    async def _records(self, handover: Handover | None) -> Vector | None:
        """Return the records that `handover` is about, from the rank that holds them.

        Raises:
            RankGone: it is dead.
            RankError: it has none, or others than it had named.
        """
        if handover is None:
            return None
        vector: Vector = await self._hosts.call(handover.holder, "records")
        if vector_sha256(vector) != handover.vector_sha256:
            raise RankError("the records of its commit are not those that it had named")
        return vector


def _outcomes(
    ranks: Iterable[int], commit_outcome: CommitOutcome, handover: Handover | None, vector: Vector | None
) -> dict[int, CommitOutcome]:
    """Return what each of `ranks` is told: only those that lack the records get them."""
    lacking = frozenset[int]() if handover is None else handover.lacking
    with_records = replace(commit_outcome, vector=vector)
    return {rank: with_records if rank in lacking else commit_outcome for rank in ranks}
