"""If the first rank cannot complete a checkpoint, all ranks know that it does not exist."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jobs import job, small_config
from test_checkpoint_writer import states

from workers.checkpoint.coordination import Checkpointing
from workers.checkpoint.folder import checkpoint_folder, checkpoints
from workers.commit.commit import CommitRecord
from workers.config import CheckpointConfig
from workers.protocol.carried import Carried
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.orders import Generation
from workers.protocol.reports import CheckpointReport, Report
from workers.state.layer_state import LayerState, host_copy


class Ranks:
    """Two ranks with one layer each, and their commits.

    Args:
        frozen: layers that are frozen.
        keep: checkpoints that are kept.
    """

    def __init__(self, output: Path, frozen: int = 0, keep: int = 3) -> None:
        self.frozen = frozen
        self.config = small_config(output, checkpoint=CheckpointConfig(keep=keep))
        plan = job(self.config, ranks=2).plan
        generation = Generation(
            number=1, epoch=1, members=(0, 1), store_host="", store_port=0, timeout_s=60.0
        )
        self.told: list[Report] = []
        self.slowest_s = 0.0
        """How long the slowest rank wrote what the newest commit told."""
        self.ranks = [
            Checkpointing(self.config, ("l0", "l1"), plan, generation, self.told.append) for _ in range(2)
        ]
        self.layers = states(2, 10)

    def save(self, step: int) -> str:
        for rank, layer in zip(self.ranks, self.layers, strict=True):
            carried = Carried(prefix=FrozenPrefix(layers=self.frozen))
            rank.start(step, partial(_copied, layer), carried)
            rank._take(rank._writer.wait())
        return checkpoint_folder(self.config.job.folder, step, 1)

    def commit(self, step: int) -> list[int]:
        """The step of the newest checkpoint that each rank considers complete."""
        records, took_s = list[CommitRecord](), list[float]()
        for place, rank in enumerate(self.ranks):
            files, seconds, errors = rank.finished_files()
            took_s += seconds.values()
            records.append(
                CommitRecord(
                    rank=place, generation=1, step=step, files=files, files_s=seconds, files_errors=errors
                )
            )
        self.slowest_s = max(took_s, default=0.0)
        for place, rank in enumerate(self.ranks):
            rank.observe(records, place)
        return [rank.whole for rank in self.ranks]


def _copied(layer: LayerState, written: Callable[[LayerState], bool]) -> list[LayerState]:
    return [] if written(layer) else [host_copy(layer)]


def test_a_checkpoint_without_a_manifest_is_whole_for_nobody(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    first = ranks.save(2)
    assert ranks.commit(3) == [0, 0]
    assert ranks.commit(4) == [2, 2]
    second = ranks.save(4)
    # Its folder is replaced by a file before the first rank writes the manifest.
    shutil.rmtree(second)
    Path(second).touch()
    ranks.commit(5)
    assert [ranks.commit(step) for step in (6, 7)] == [[2, 2], [2, 2]]
    assert [ref.path for ref in checkpoints(ranks.config.job.folder)] == [first]
    told = [(one.step, one.error is None) for one in ranks.told if isinstance(one, CheckpointReport)]
    assert told == [(2, True), (4, False)]
