"""If the first rank cannot complete a checkpoint, all ranks know that it does not exist."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs import job, small_config
from test_checkpoint_writer import states

from workers.carried import Carried
from workers.checkpoint.coordination import Checkpointing
from workers.checkpoint.folder import checkpoint_folder, checkpoints
from workers.commit.commit import CommitRecord
from workers.protocol.orders import Generation
from workers.protocol.reports import CheckpointReport, Report
from workers.state.layer_state import host_copy


class Ranks:
    """Two ranks with one layer each, and their commits."""

    def __init__(self, output: Path) -> None:
        self.config = small_config(output)
        plan = job(self.config, ranks=2).plan
        generation = Generation(
            number=1, epoch=1, members=(0, 1), store_host="", store_port=0, timeout_s=60.0
        )
        self.told: list[Report] = []
        self.ranks = [
            Checkpointing(self.config, ("l0", "l1"), plan, generation, self.told.append) for _ in range(2)
        ]
        self.layers = states(2, 10)

    def save(self, step: int) -> str:
        for rank, layer in zip(self.ranks, self.layers, strict=True):
            rank.start(step, lambda layer=layer: [host_copy(layer)], Carried())
            rank._take(rank._writer.wait())
        return checkpoint_folder(self.config.job.folder, step, 1)

    def commit(self, step: int) -> list[int]:
        """The step of the newest checkpoint that each rank considers complete."""
        records = []
        for place, rank in enumerate(self.ranks):
            files, errors = rank.finished_files()
            records.append(
                CommitRecord(rank=place, generation=1, step=step, files=files, files_errors=errors)
            )
        for place, rank in enumerate(self.ranks):
            rank.observe(records, place)
        return [rank.whole for rank in self.ranks]


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
