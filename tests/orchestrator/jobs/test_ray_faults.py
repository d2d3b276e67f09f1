"""Faults in jobs on a real Ray cluster: requested as by `freshet fault`, logged, or refused and explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here
from pace import patient
from ray_jobs import Log, assert_nothing_left, state_sha256
from tiny_jobs import tiny

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.cli.steering import steer
from orchestrator.commands.fault import InjectFault
from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.fault_injection.drill import Drill
from workers.protocol.reports import FaultReport, StepReport

STEPS = 20
LAYER_S = patient(0.008)
CLUSTER = {
    "device": "emulated",
    # Steps take two fifths of a second, longer on a busy machine; faults are armed while the ranks join.
    "emulated": {"forward_s": LAYER_S, "input_grad_s": LAYER_S, "weight_grad_s": LAYER_S},
}


@pytest.fixture(autouse=True)
def nothing_left(two_nodes: None) -> Iterator[None]:
    yield
    assert_nothing_left()


def job(folder: Path, name: str, ranks: int = 2, **elastic: Any) -> Spec:
    return tiny(
        folder,
        name,
        job={"steps": STEPS},
        pipeline={"ranks": ranks},
        elastic={"allow_faults": True, "grow": False, **elastic},
        cluster=CLUSTER,
    )


def when_all_have_started(act: Callable[[], None], ranks: int = 2) -> Log:
    """A log that acts once the last rank's process is up, before the first step."""

    def see(record: events.Record) -> None:
        if isinstance(record.event, events.RankStarted) and len(log.of(events.RankStarted)) == ranks:
            act()

    log = Log(see)
    return log


def fired(log: Log) -> list[tuple[int, str, int, str]]:
    return [(r.rank, r.fault, r.step, r.phase) for r in log.of(FaultReport)]


def test_stopped_slowed_and_throttled_ranks_and_one_that_leaves_have_the_usual_bits_and_the_rest_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int | str | None] = []
    said: list[str] = []
    refused: list[str] = []

    def ask(*words: str) -> None:
        assert freshet_here("fault", *words) == USER_ERROR
        refused.append(capsys.readouterr().err)

    def arm() -> None:
        for rank, fault in (
            (1, {"kind": "stop", "seconds": 3, "step": 8, "phase": "backward"}),
            (0, {"kind": "slow", "factor": 3, "step": 9, "steps": 2}),
            (1, {"kind": "throttle-link", "bytes_per_s": 1e6, "step": 10, "steps": 1}),
        ):
            drill = Drill.from_json({"rank": rank, "fault": fault})
            said.append(steer("auto", "drilled", InjectFault(drill=drill.to_json()), wait=False))
        drain = ("drain", "--rank", "1", "--step", "12", "--deadline", "600")
        codes.append(freshet_here("fault", "drilled", *drain))
        # The job must not end before the controller requests another generation.
        stop = ("stop", "--rank", "0", "--step", "13", "--seconds", "5")
        codes.append(freshet_here("fault", "drilled", *stop))
        capsys.readouterr()
        ask("drille", "kill", "--rank", "0")
        ask("drilled", "kill", "--rank", "9", "--step", "1000")
        ask("drilled", "kill")
        ask("drilled", "drain", "--node", "nowhere")

    log = when_all_have_started(arm)
    result = PipelineTrainer(job(tmp_path, "drilled"), observe=log).fit()
    assert result.error is None
    assert said == [
        "stop for 3 s on rank 1, in phase backward of step 8",
        "slow 3 times for 2 steps on rank 0, in phase forward of step 9",
        "throttle-link to 1e+06 bytes/s for 1 step on rank 1, in phase forward of step 10",
    ]
    assert codes == [DONE, DONE]
    assert sorted(fired(log)) == [
        (0, "slow 3 times for 2 steps", 9, "forward"),
        (0, "stop for 5 s", 13, "forward"),
        (1, "drain for 600 s", 12, "forward"),
        (1, "stop for 3 s", 8, "backward"),
        (1, "throttle-link to 1e+06 bytes/s for 1 step", 10, "forward"),
    ]
    no_job, no_rank, which, no_node = refused
    assert "no job 'drille'" in no_job
    assert "did you mean 'drilled'?" in no_job
    assert "no rank 9; it has 0, 1" in no_rank
    assert "kill of which rank? The job has 0, 1" in which
    assert "no node 'nowhere'" in no_node
    # The drained rank is let go before its deadline.
    (notice,) = log.of(events.Noticed)
    assert (notice.source, notice.ranks, notice.left_s) == ("sigterm", (1,), 600.0)
    (regrouped,) = log.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("drain", (1,), 0)
    assert result.metrics is not None
    assert result.metrics["state_sha256"] == state_sha256(job(tmp_path / "plain", "plain", 1))


def test_a_kill_by_the_command_is_told_of_and_fails_a_job_without_copies_by_the_ranks_name(
    tmp_path: Path,
) -> None:
    codes: list[int | str | None] = []

    words = ("--rank", "0", "--step", "7", "--phase", "before-commit")
    log = when_all_have_started(
        lambda: codes.append(freshet_here("fault", "killed", "kill", *words)), ranks=1
    )
    spec = job(tmp_path, "killed", ranks=1, redundancy="none")
    checkpoints = spec.checkpoint.model_copy(update={"every_steps": 1})
    result = PipelineTrainer(spec.model_copy(update={"checkpoint": checkpoints}), observe=log).fit()
    assert codes == [DONE]
    assert fired(log) == [(0, "kill", 7, "before-commit")]
    failed = log.of(events.RankFailed)[0]
    assert failed.rank == 0
    assert log.events.index(log.of(FaultReport)[0]) < log.events.index(failed)
    (pid,) = [started.pid for started in log.of(events.RankStarted)]
    assert result.error is not None
    assert f"rank 0: its process (pid {pid} on" in str(result.error)
    assert log.of(events.Failed)[0].reason.startswith("rank 0: its process")
    assert result.checkpoint is None or Path(result.checkpoint.path).is_dir()
    log.assert_processes_gone()
    assert max(report.step for report in log.of(StepReport)) < 7
