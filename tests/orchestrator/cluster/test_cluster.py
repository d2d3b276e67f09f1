"""A local cluster: its token is created once, for its owner alone, and a failed start is tried again."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from pace import patient

from orchestrator.cluster.connection import (
    ATTEMPTS,
    CLUSTER_LOST_S,
    SUBMITTED,
    _initialise,
    connected,
    prepare_local,
)
from workers.control.rescues import HEAD_LOST
from workers.protocol.errors import JobError


def test_the_first_on_a_machine_makes_a_token_and_all_others_take_it(tmp_path: Path) -> None:
    token = tmp_path / "home" / "token"
    for _ in range(2):
        environment = {"RAY_AUTH_TOKEN_PATH": str(token)}
        prepare_local(environment)
        assert "RAY_AUTH_TOKEN" not in environment
        made = token.read_text()
        assert len(made) == 32
    assert token.read_text() == made
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert os.listdir(token.parent) == ["token"]


def test_where_none_can_be_kept_it_is_this_jobs_own() -> None:
    environment = {"RAY_AUTH_TOKEN_PATH": "/dev/null/token"}
    prepare_local(environment)
    assert len(environment["RAY_AUTH_TOKEN"]) == 32


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for given in ({"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_MODE": "disabled"}):
        environment = {"RAY_AUTH_TOKEN_PATH": str(token), **given}
        prepare_local(environment)
        assert environment.items() >= given.items()
        assert not token.exists()


class SlowStart:
    """`ray.init` on a machine where the first `failures` starts take longer than Ray waits."""

    def __init__(self, failures: int) -> None:
        self.left: list[psutil.Process] = []
        """What each start has launched."""
        self._failures = failures

    def __call__(self, address: str, **options: Any) -> None:
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.left.append(psutil.Process(started.pid))
        if len(self.left) <= self._failures:
            raise Exception("The current node timed out during startup.")


def test_what_was_half_started_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStart(failures=1)
    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr("orchestrator.cluster.connection.SHUTDOWN_S", 0.1)
    with connected("local", cpus=1):
        assert [process.is_running() for process in slow.left] == [False, True]
    assert not any(process.is_running() for process in slow.left)


def test_a_cluster_that_does_not_start_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStart(failures=ATTEMPTS)
    monkeypatch.setattr(ray, "init", slow)
    told = f"could not start Ray on this machine, tried {ATTEMPTS} times: The current node timed out"
    with pytest.raises(JobError, match=told), connected("local", cpus=1):
        raise AssertionError("it did not start")
    assert len(slow.left) == ATTEMPTS
    assert not any(process.is_running() for process in slow.left)


def test_a_submitted_job_starts_no_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUBMITTED, "{}")
    with (
        pytest.raises(JobError, match=r"was submitted to one already: .* --set cluster.address=auto"),
        connected("local", cpus=1),
    ):
        raise AssertionError("it started")


def test_what_rays_processes_publish_stays_off_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    message = {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}
    monkeypatch.setattr("orchestrator.cluster.connection._initialise", lambda address, options: None)
    with connected("local", cpus=1):
        worker.print_to_stdstream(message, ignore_prefix=False)
        assert capsys.readouterr().out == ""
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert "Raylet is terminated." in capsys.readouterr().out


CALLS_WITHOUT_A_CLUSTER = """
from orchestrator.cluster.connection import connected
from workers.protocol.errors import JobError

try:
    with connected("127.0.0.1:1", cpus=1):
        pass
except JobError:
    import ray

    try:
        ray.get_actor("nobody")
    except ray.exceptions.RaySystemError as error:
        print(error, ray.is_initialized())
"""


def test_a_call_that_outlives_its_connection_starts_no_cluster() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ENABLE_AUTO_CONNECT"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS_WITHOUT_A_CLUSTER],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert "Ray has not been started yet" in done.stdout, done
    assert done.stdout.rstrip().endswith("False")


@pytest.mark.parametrize("own", [None, "7"])
def test_a_driver_stays_without_its_cluster_and_its_children_get_the_users_setting(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    read: list[str | None] = []

    def init(address: str, **_: object) -> None:
        read.append(os.environ.get(HEAD_LOST))
        if address != "10.0.0.1:6379":
            raise ConnectionError("there is no cluster")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv(HEAD_LOST, raising=False)
    if own is not None:
        monkeypatch.setenv(HEAD_LOST, own)
    _initialise("10.0.0.1:6379", {})
    assert os.environ.get(HEAD_LOST) == own
    with pytest.raises(JobError):
        _initialise("10.0.0.2:6379", {})
    assert os.environ.get(HEAD_LOST) == own
    assert read == [str(CLUSTER_LOST_S)] * 2
