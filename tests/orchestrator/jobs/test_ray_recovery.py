"""Losses on a real Ray cluster: the survivors go on in place and end with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import pytest
import ray
from pace import patient
from process_hosts import ElasticJob
from ray_jobs import Log, assert_nothing_left, controller_pid, kill_controller, resolved, state_sha256
from ray_jobs import wait_for as wait_until
from tiny_jobs import tiny

from orchestrator.cli.jobs import status_lines
from orchestrator.cli.steering import reap_job
from orchestrator.client.blocking import Call
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.cluster import connection as cluster
from orchestrator.cluster.ray_hosts import RayHosts
from orchestrator.events import types as events
from orchestrator.events.log import line_sha256, read_log
from orchestrator.history.folder import LOCK, JobFolder
from orchestrator.trainer import PipelineTrainer
from orchestrator.verify.verification import verify_run
from workers.actor import Home
from workers.process.process_times import ProcessTimes, Standing
from workers.protocol.errors import JobError
from workers.protocol.reports import StandbyReport, StepReport

STEPS = 12
ONE, TWO = {"ranks": 1}, {"ranks": 2}
"""Few ranks: most of a job's time goes into imports of PyTorch in each. The bits are the same for any."""
SLOW: dict[str, Any] = {
    "wait_s": 240,
    "device": "emulated",
    "emulated": {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005},
}


@pytest.fixture(autouse=True)
def nothing_left(two_nodes: None) -> Iterator[None]:
    yield
    assert_nothing_left()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state of an undisturbed run of the same job."""
    return state_sha256(job(tmp_path_factory.mktemp("quiet"), "quiet"))


def job(folder: Path, name: str, **sections: dict[str, Any]) -> Any:
    given: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "sample_tokens": 0},
        "cluster": SLOW,
        "elastic": {"grow": False},
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return tiny(folder, name, **given)


def at_step(step: int, act: Callable[[], object]) -> Callable[[events.Record], None]:
    """An observer that acts when `step` is announced."""
    done: list[int] = []

    def observe(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step >= step and not done:
            done.append(step)
            act()

    return observe


def both(*observers: Callable[[events.Record], None]) -> Callable[[events.Record], None]:
    def observe(record: events.Record) -> None:
        for each in observers:
            each(record)

    return observe


def after_a_takeover(observer: Callable[[events.Record], None]) -> Callable[[events.Record], None]:
    """`observer` for the records after a controller has taken over."""
    taken: list[events.Submitted] = []

    def observe(record: events.Record) -> None:
        if isinstance(record.event, events.Submitted) and record.event.takeover:
            taken.append(record.event)
        if taken:
            observer(record)

    return observe


def once_copied(act: Callable[[], object]) -> Callable[[events.Record], None]:
    """An observer that acts at a step after a regrouping, when the rank of the first place has copies of the others."""
    seen: list[events.Event] = []

    def observe(record: events.Record) -> None:
        copied = isinstance(record.event, StandbyReport) and record.event.rank == 0 and record.event.layers
        if isinstance(record.event, events.Regrouped) or (len(seen) == 1 and copied):
            seen.append(record.event)
        elif len(seen) == 2 and isinstance(record.event, StepReport):
            seen.append(record.event)
            act()

    return observe


def inject(log: Log, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid_of(log, rank), how)


def pid_of(log: Log, rank: int) -> int:
    return next(each.pid for each in log.of(events.RankStarted) if each.rank == rank)


def check(log: Log, expected: str, result: Any) -> None:
    """Check that no step is missing or doubled, and that the bits are those of an undisturbed run."""
    assert result.error is None, result.error
    assert [report.step for report in log.of(StepReport)] == list(range(1, STEPS + 1))
    assert result.metrics["state_sha256"] == expected


@pytest.mark.soak  # killed with its controller below; ranks hang in `controller/ranks/test_hangs.py`
def test_a_rank_is_killed_and_then_one_hangs_and_the_last_goes_on(tmp_path: Path, quiet: str) -> None:
    kill = at_step(3, lambda: inject(log, 2))
    hang = once_copied(lambda: inject(log, 1, signal.SIGSTOP))
    log = Log(both(kill, hang))
    spec = job(tmp_path, "killed", pipeline={"ranks": 3}, elastic={"hang_timeout_s": 8.0})
    result = PipelineTrainer(spec, observe=log).fit()
    check(log, quiet, result)
    first, second = log.of(events.Regrouped)
    assert (first.cause, first.lost, first.steps_lost) == ("loss", (2,), 0)
    assert (second.cause, second.lost, second.steps_lost) == ("loss", (1,), 0)
    assert first.rerun <= 1
    assert second.rerun <= 1
    # Someone on its own node looked.
    failed = log.of(events.RankFailed)[-1]
    assert "answered nothing for 8 s" in failed.error
    assert "its process is stopped" in failed.error
    assert second.detect_s >= second.silent_s >= 7.0
    # The survivors were never restarted, and they end with the job.
    assert len(log.of(events.RankStarted)) == 3
    log.assert_processes_gone()


def test_a_silent_process_is_looked_at_from_its_own_node(tmp_path: Path) -> None:
    """No rank of the job is there to look: a process of Ray's is started for it."""
    setup = ElasticJob(resolved(job(tmp_path, "looked-at"))).setup

    async def look() -> list[ProcessTimes | None]:
        hosts = RayHosts(setup.ranks, cast(Any, None))
        nodes = [node.id for node in cluster.nodes()]
        homes = [Home(node=node, host="h", pid=os.getpid()) for node in nodes]
        async with asyncio.timeout(patient(120)):
            return [await hosts.look(home) for home in homes]

    seen = [times for times in asyncio.run(look()) if times is not None]
    assert len(seen) == 2
    assert all(times.standing in (Standing.RUNNABLE, Standing.SLEEPING) for times in seen)
    assert all(times.ran_s > 0 for times in seen)


def test_a_controller_is_killed_and_then_it_and_a_rank_together(tmp_path: Path, quiet: str) -> None:
    """The next one takes over ranks that train on; the second time, one rank and the loss of the other.

    Their arguments, like those of controllers of a job with many ranks, are larger than what Ray keeps by itself.
    """

    def kill_both() -> None:
        assert log.of(events.Regrouped) == []
        kill_controller("headless")
        inject(log, 1)

    def alone_for_once() -> None:
        kill_controller("headless")

    # While a controller takes over on a slow machine, ranks train on: they must have steps left for the second time,
    # which therefore comes as soon as there is another controller.
    slower = {"emulated": dict.fromkeys(SLOW["emulated"], 0.05)}
    log = Log(both(at_step(2, alone_for_once), after_a_takeover(at_step(3, kill_both))))
    spec = job(tmp_path, "headless", pipeline=TWO, cluster=slower, logging={"project": "long" * 2**16})
    result = PipelineTrainer(spec, observe=log).fit()
    check(log, quiet, result)
    taken = [(each.epoch, each.takeover) for each in log.of(events.Submitted)]
    assert taken == [(1, False), (2, True), (3, True)]
    (regrouped,) = log.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost) == ("loss", (1,))
    issued = [(each.plan.epoch, each.plan.version) for each in log.of(events.Issued)]
    assert issued == [(1, 1), (3, 1)]
    records = list(read_log(tmp_path / "headless" / "events.jsonl"))
    assert [record.event for record in records] == log.events
    # Each controller went on with the chain of hashes where the one before had left it, and a checkpoint names a line.
    ledger, _ = verify_run(str(tmp_path / "headless"))
    assert ledger.wrong == ledger.unproved == []
    assert any("no line of the log changed" in claim for claim in ledger.claims)
    (manifest,) = (tmp_path / "headless" / "checkpoints").glob("*/manifest.json")
    lines = (tmp_path / "headless" / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(manifest.read_text())["log_sha256"] in map(line_sha256, lines)
    log.assert_processes_gone()


def test_a_takeover_does_what_it_was_asked_meanwhile_and_fails_over_a_damaged_log_in_words(
    tmp_path: Path,
) -> None:
    spec = job(tmp_path, "asked", job={"steps": 100_000}, pipeline=ONE)
    folder, client = JobFolder(spec.job.output), BlockingJobClient()
    killed: list[int] = []
    said: list[str] = []

    def kill_and_hold() -> IO[bytes]:
        """While another process holds the folder, the next controller cannot take over."""
        killed.append(controller_pid("asked"))
        return held_after(lambda: os.kill(killed[-1], signal.SIGKILL), folder)

    def kill_and_ask() -> None:
        held = kill_and_hold()
        # The log looks as if the controller was killed while it wrote an event.
        with folder.events_path.open("ab") as file:
            file.write(b'{"time_s": 1.0, "kind": "st')
        asked = Call(client.waiting.checkpoint("asked"))
        wait_until(lambda: any("another run is at work" in line for line in status_lines("auto")))
        assert controller_pid("asked") != killed[0]
        assert not asked.done()
        held.close()
        said.append(client.outcome(asked.result(60), timeout_s=60).text)

    def kill_and_damage() -> None:
        held = kill_and_hold()
        with folder.events_path.open("ab") as file:
            file.write(b"no event\n")
        held.close()

    log = Log(both(at_step(4, kill_and_ask), after_a_takeover(at_step(5, kill_and_damage))))
    with pytest.raises(JobError, match=r"cannot take the job over: .*events\.jsonl, line \d+, is no event"):
        PipelineTrainer(spec, observe=log).fit()
    assert len(killed) == 2
    assert said[0].startswith("checkpoint of step ")
    assert any("the last line of the event log was torn" in warned.text for warned in log.of(events.Warned))
    assert [failed.user_error for failed in log.of(events.Failed)] == [True]
    log.assert_processes_gone()


def held_after(kill: Callable[[], None], folder: JobFolder) -> IO[bytes]:
    """Lock `folder` once `kill` has killed its holder; this thread queues before the next controller does."""
    held = (Path(folder.location) / LOCK).open("wb")
    waiting = threading.Thread(target=fcntl.flock, args=(held, fcntl.LOCK_EX), daemon=True)
    waiting.start()
    kill()
    waiting.join(60)
    assert not waiting.is_alive(), "the folder is still locked"
    return held


DRIVER = """
import sys
from pathlib import Path
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
print(PipelineTrainer(Spec.model_validate_json(Path(sys.argv[1]).read_text())).fit().error)
"""
PHASES = {"method": "timelyfreeze", "r_max": 0.8, "warm_up": 4, "monitoring": 60, "ramp": 70}


def logged(path: Path) -> list[events.Event]:
    return [record.event for record in read_log(path)] if path.exists() else []


def wait_for(path: Path, true: Callable[[list[events.Event]], bool]) -> list[events.Event]:
    deadline = time.monotonic() + patient(240)
    while not true(seen := logged(path)):
        assert time.monotonic() < deadline, f"it did not happen; the log ends with {seen[-3:]}"
        time.sleep(0.1)
    return seen


@pytest.mark.soak  # each alone: above, in `test_ray_following.py` and in `test_ray_planner.py`
def test_driver_planner_and_controller_killed_together_the_ranks_train_on_to_the_end(tmp_path: Path) -> None:
    times = {"forward_s": 0.005, "input_grad_s": 0.005, "weight_grad_s": 0.005}
    spec = job(
        tmp_path,
        "headless",
        job={"steps": 80},
        freeze=PHASES,
        pipeline=ONE,
        cluster={"emulated": times},
    )
    file = tmp_path / "spec.json"
    file.write_text(spec.model_dump_json())
    address = ray.get_runtime_context().gcs_address
    path = tmp_path / "headless" / "events.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(file)],
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(cluster.import_paths())},
        stdout=subprocess.DEVNULL,
    ) as driver:
        seen = wait_for(
            path,
            lambda log: (
                any(isinstance(event, events.PlannerStarted) for event in log)
                and any(isinstance(event, StepReport) and event.step >= 5 for event in log)
            ),
        )
        planner = next(event.pid for event in seen if isinstance(event, events.PlannerStarted))
        driver.kill()
        kill_controller("headless")
        with suppress(ProcessLookupError):  # it may go with its owner, the controller
            os.kill(planner, signal.SIGKILL)
    seen = wait_for(path, lambda log: isinstance(log[-1], events.Finished))
    assert [event.step for event in seen if isinstance(event, StepReport)] == list(range(1, 81))
    assert [event.epoch for event in seen if isinstance(event, events.Submitted)] == [1, 2]
    assert [event.generation.number for event in seen if isinstance(event, events.Formed)] == [1]
    assert any("headless: finished, step 80 of 80" in line for line in status_lines("auto"))
    assert reap_job("headless", "auto", force=False).startswith(
        "headless: 0 ranks and its controller cleared"
    )


def test_a_controller_that_does_not_see_the_folder_ends_the_job_in_words(tmp_path: Path) -> None:
    """This is as if its node had died with the folder, and Ray started the controller on another node."""
    folder, elsewhere = tmp_path / "homeless", tmp_path / "elsewhere"

    def lose_the_folder() -> None:
        folder.rename(elsewhere)
        kill_controller("homeless")

    lose_once = at_step(4, lose_the_folder)

    def observe(record: events.Record) -> None:
        lose_once(record)
        if isinstance(record.event, events.Failed):  # the driver reads the log at its end
            elsewhere.rename(folder)

    log = Log(observe)
    endless = job(tmp_path, "homeless", job={"steps": 100_000}, pipeline=ONE)
    result = PipelineTrainer(endless, observe=log).fit()
    assert "the one in its place has no log to go on from: node" in str(result.error)
    assert f"does not see the job's folder {folder}: put job.output on a file system that" in str(
        result.error
    )
    log.assert_processes_gone()
