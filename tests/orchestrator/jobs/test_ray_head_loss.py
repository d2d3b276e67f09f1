"""The head of a real Ray cluster is killed: ranks write a checkpoint at once and another before Ray ends them, and a
job that resumes has all their steps, with the bits of one that nothing disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from pace import patient
from ray_jobs import state_sha256
from tiny_jobs import tiny

from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_without_controller
from orchestrator.spec.job_spec import Spec
from orchestrator.verify.verification import verify_run
from workers.checkpoint.folder import checkpoints
from workers.checkpoint.left_behind import FOLDER, NOTE, left_reports
from workers.control.rescues import HEAD_LOST
from workers.protocol.reports import Rescued, StepReport

PATIENCE_S = 12
"""How long Ray's processes go on without the head here; a minute unless told otherwise."""
STEPS = 80
"""More than ranks can train until Ray ends them."""
STEP_S = 0.25

CLUSTER = """
import json
import sys
from ray_nodes import add_node, start_head

nodes = start_head(0)
other = add_node(nodes, 2)
pids = {
    kind: [started.process.pid for started in found]
    for kind, found in nodes.head_node.all_processes.items()
}
print(json.dumps({"address": nodes.address, "head": sum(pids.values(), []), "gcs": pids["gcs_server"]}), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Mortal:
    """A cluster with a head that runs no ranks, and a node with room for two."""

    address: str
    head: Sequence[int]
    """Processes that make up the head's node, without those that they started."""
    gcs: Sequence[int]
    process: psutil.Process


@contextmanager
def mortal() -> Iterator[Mortal]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {HEAD_LOST: str(PATIENCE_S), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    root = psutil.Process(process.pid)
    try:
        said = json.loads(process.stdout.readline())
        yield Mortal(process=root, **said)
    finally:
        family = root.children(recursive=True)
        kill([root, *family])
        process.communicate()


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def until(true: Callable[[], bool], driver: Driver | None = None, limit_s: float = 240.0) -> None:
    """Wait until `true` holds; if it does not, show what `driver` has said."""
    deadline_s = time.monotonic() + patient(limit_s)
    while not true():
        assert time.monotonic() < deadline_s, driver.said if driver else f"not within {limit_s:g} s"
        assert driver is None or driver.process.poll() is None, driver.said
        time.sleep(0.1)


def spec_at(folder: Path, address: str, step_s: float, ranks: int = 2) -> Spec:
    times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), step_s / 24)
    return tiny(
        folder,
        "headless",
        job={"steps": STEPS, "sample_tokens": 0},
        pipeline={"ranks": ranks, "microbatches": 4},
        checkpoint={"keep": 3},
        cluster={
            "address": address,
            "device": "emulated",
            "emulated": times,
            "resources_per_rank": {"CPU": 1.0},
        },
    )


@dataclass(frozen=True)
class Driver:
    """A running `freshet train`."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        """Everything that it has printed."""
        return self.output.read_text()

    def end(self) -> str:
        """Wait for its end, and return what it has printed."""
        self.process.wait(300)
        return self.said


@contextmanager
def train(spec: Spec, *options: str) -> Iterator[Driver]:
    """`freshet train` of `spec`."""
    file, output = (Path(spec.job.folder).with_suffix(suffix) for suffix in (".json", ".log"))
    file.write_text(json.dumps(spec.model_dump(mode="json", exclude_defaults=True)))
    code = (
        "import json; from orchestrator.spec import job_spec; from orchestrator.cli import training;"
        "training.load = lambda path, overrides: job_spec.Spec.model_validate(json.loads(open(path).read()));"
        "from orchestrator.cli.main import main; main()"
    )
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "train", str(file), *options],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {HEAD_LOST: str(PATIENCE_S), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        yield Driver(process, output)
    finally:
        process.kill()
        process.wait()


def steps_in(folder: Path) -> int:
    log = folder / "events.jsonl"
    if not log.exists():
        return 0
    return max((r.event.step for r in read_log(log) if isinstance(r.event, StepReport)), default=0)


def ranks_in(folder: Path) -> list[int]:
    return [r.event.pid for r in read_log(folder / "events.jsonl") if isinstance(r.event, events.RankStarted)]


def resume(folder: Path) -> str | None:
    """Resume on one rank in a cluster of its own, with no time to wait out; return the final state's hash."""
    spec = spec_at(folder, "local", 0.0, ranks=1)
    with train(spec, "--resume") as driver:
        said = driver.end()
    assert driver.process.returncode == 0, said
    log = read_log(Path(spec.job.folder) / "events.jsonl")
    return [record.event for record in log if isinstance(record.event, events.Finished)][-1].state_sha256


def kill_head(cluster: Mortal, *, whole: bool) -> None:
    """Kill the control store, or all of the head's node."""
    doomed = [psutil.Process(pid) for pid in (cluster.head if whole else cluster.gcs)]
    if whole:
        doomed += [child for process in doomed for child in process.children(recursive=True)]
    kill(doomed)
    until(lambda: not any(map(lives, doomed)))


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def rescues_of(told: Iterable[object]) -> list[Rescued]:
    return [report for report in told if isinstance(report, Rescued)]


def test_ranks_outlive_the_head_and_the_controller_by_two_checkpoints(tmp_path: Path) -> None:
    with mortal() as cluster:
        spec = spec_at(tmp_path, cluster.address, STEP_S)
        folder = Path(spec.job.folder)
        with train(spec) as driver:
            until(lambda: steps_in(folder) > 5, driver)
            ranks = [psutil.Process(pid) for pid in ranks_in(folder)]
            assert len(ranks) == 2
            kill_head(cluster, whole=True)
            logged = steps_in(folder)
            until(lambda: bool(checkpoints(str(folder))))
            first = checkpoints(str(folder))[0]
            assert first.step >= logged
            assert all(map(lives, ranks))
            until(lambda: not any(map(lives, ranks)))

    # The controller went with the head's node: its log ends there, and the ranks left the rest.
    assert steps_in(folder) == logged
    last = checkpoints(str(folder))[0]
    assert first.step < last.step < STEPS
    left = [report for _, report in left_reports(str(folder))]
    assert [rescue.step for rescue in rescues_of(left)] == [first.step, last.step]
    assert f"wrote a checkpoint of step {last.step}" in (folder / FOLDER / NOTE).read_text()
    assert f"cluster's head after step {last.step}" in view_without_controller(JobFolder(str(folder))).trouble
    ledger, _ = verify_run(str(folder))
    assert (ledger.wrong, ledger.steps) == ([], last.step)

    assert resume(tmp_path) == state_sha256(spec_at(tmp_path, cluster.address, 0.0, ranks=1))
    assert not (folder / FOLDER).exists()
    ledger, lines = verify_run(str(folder))
    assert (ledger.wrong, ledger.steps) == ([], STEPS), lines
    assert ledger.superseded == 0


@pytest.mark.soak
def test_a_driver_and_a_controller_that_outlive_the_head_tell_of_it(tmp_path: Path) -> None:
    with mortal() as cluster:
        spec = spec_at(tmp_path, cluster.address, STEP_S)
        folder = Path(spec.job.folder)
        with train(spec) as driver:
            until(lambda: steps_in(folder) > 5, driver)
            kill_head(cluster, whole=False)
            said = driver.end()
    told = rescues_of(record.event for record in read_log(folder / "events.jsonl"))
    assert len(told) == 2
    assert told[0].ends_s == pytest.approx(told[0].lost_s + PATIENCE_S)
    assert [ref.step for ref in checkpoints(str(folder))] == [told[1].step, told[0].step]
    assert "does not answer" in said
    assert f"The ranks wrote a checkpoint of step {told[0].step}" in said
    assert f"--resume goes on from the checkpoint of step {told[1].step}" in said
    assert driver.process.returncode == 1
