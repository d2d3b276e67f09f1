"""Layers of a job on a real Ray cluster move as `freshet move` requests, or it says why they cannot.

For `make bench`: in `make test`, `test_ray_commands.py` moves layers of another job, and `test_moves.py` those of a job
of plain processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import freshet_here
from ray_jobs import Log, assert_nothing_left, state_sha256
from tiny_jobs import tiny

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.protocol.reports import StepReport

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def nothing_left(two_nodes: None) -> Iterator[None]:
    yield
    assert_nothing_left()


def job(folder: Path, name: str) -> Spec:
    """A job of ten layers on four ranks: 0-1, 2-4, 5-7, 8-9."""
    return tiny(
        folder,
        name,
        job={"steps": 60, "sample_tokens": 0},
        model={"layers": 8},
        pipeline={"microbatches": 2},
        cluster={
            "device": "emulated",
            "emulated": {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005},
        },
    )


def test_layers_move_while_the_job_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers move by the command, then to a complete plan; neither forms a generation."""
    expected = state_sha256(job(tmp_path / "plain", "plain"))
    said: list[str] = []

    def ask(status: int, *words: str) -> None:
        assert freshet_here("move", *words) == status
        out = capsys.readouterr()
        said.append(out.out if status == DONE else out.err)

    def see(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step == 2:
            ask(USER_ERROR, "movin", "--layers", "4", "--to", "2")
            ask(USER_ERROR, "moving", "--layers", "4", "--to", "9")
            ask(USER_ERROR, "moving", "--layers", "4", "--to", "3")
            ask(USER_ERROR, "moving", "--layers", "10", "--to", "3")
            ask(DONE, "moving", "--layers", "3-4", "--to", "2")
        if isinstance(record.event, events.Migrated) and len(log.of(events.Migrated)) == 1:
            said.append(BlockingJobClient().apply("moving", [3, 2, 2, 3]).text)

    log = Log(see)
    result = PipelineTrainer(job(tmp_path, "moving"), observe=log).fit()
    assert result.error is None
    no_job, no_rank, not_next, no_layer, done, whole = said
    assert "no job 'movin'" in no_job
    assert "rank 9 has no place in the pipeline; ranks with a place: 0, 1, 2, 3" in no_rank
    assert "The rank holds layers 8 to 9 and can take layers 6 to 7 or the last of them" in not_next
    assert "there is no layer 10: the model has layers 0 to 9" in no_layer
    assert "2 layers (3, 4) to move, live" in done
    first, second = log.of(events.Migrated)
    assert (second.layers, second.source, second.target) == ((2, 3, 4, 7), (1, 2, 2, 2), (0, 1, 1, 3))
    assert (first.layers, first.source, first.target) == ((3, 4), (1, 1), (2, 2))
    assert "4 layers (2, 3, 4, 7) to move, live" in whole
    assert log.of(events.Issued)[-1].plan.layers == ((0, 3), (3, 5), (5, 7), (7, 10))
    assert len(log.of(events.Formed)) == 1
    (finished,) = log.of(events.Finished)
    assert finished.state_sha256 == expected
    log.assert_processes_gone()
