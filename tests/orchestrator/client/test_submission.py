"""What a submission reports before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Never

import pytest
from command_line import freshet_here
from tiny_jobs import tiny

from orchestrator.cli.exit_codes import USER_ERROR
from orchestrator.client import submit
from orchestrator.client.running import detach, run
from orchestrator.client.shadowing import OWN, shadowing
from orchestrator.client.submit import Submission
from orchestrator.prepare import settling
from orchestrator.spec.job_spec import Spec
from workers.protocol.errors import JobError


@pytest.mark.parametrize("name", ["workers.py", "planner/__init__.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    hidden = file if name.endswith("workers.py") else file.parent
    assert shadowing([str(tmp_path), str(OWN)]) == hidden
    assert shadowing([str(OWN), str(tmp_path)]) is None


def test_a_folder_of_that_name_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    assert shadowing([str(tmp_path), str(OWN)]) is None


def test_a_submission_refuses_what_the_ranks_could_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workers.py").write_text("")
    monkeypatch.setattr(submit, "import_paths", lambda: [str(tmp_path), str(OWN)])
    with pytest.raises(
        JobError, match=r"workers\.py hides a package of Freshet's from the ranks.*: rename it"
    ):
        Submission(tiny(tmp_path, "a"), resume=False, say=print)


def test_python_m_names_a_file_that_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("raise AssertionError")
    ran = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(OWN)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == USER_ERROR
    hidden = tmp_path / "workers.py"
    assert ran.stderr.startswith(f"freshet: {hidden} hides a package of Freshet's from this command")
    assert ran.stderr.count("\n") == 1


def test_a_users_dashboard_hides_nothing_from_ranks_but_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dashboard.py").write_text("raise AssertionError")
    assert shadowing([str(tmp_path), str(OWN)]) is None
    monkeypatch.chdir(tmp_path)
    assert freshet_here("dashboard", "--runs", str(tmp_path)) == USER_ERROR
    assert f"{tmp_path / 'dashboard.py'} hides a package of Freshet's" in capsys.readouterr().err


def test_a_folder_that_ray_may_delete_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    inside = tmp_path / "working_dir_files" / "_ray_pkg_1"
    inside.mkdir(parents=True)
    for folder in (tmp_path, inside):
        Submission(tiny(folder, "a"), resume=False, say=said.append)
    (warning,) = said
    assert f"job.output = {inside / 'a'} lies in Ray's copy of the working directory" in warning
    assert "--set job.output=" in warning


def test_more_ranks_than_the_model_has_layers_are_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(*given: object, **named: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("orchestrator.client.running.cluster.connected", connected)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    spec = tiny(tmp_path, "a", pipeline={"ranks": 50}, cluster={"address": "local"})
    with pytest.raises(JobError, match=r"pipeline.ranks = 50 is more than the model can fill: 50 ranks"):
        run(spec, resume=False, observe=print, say=print)


@pytest.mark.parametrize("start", [partial(run, observe=print), detach], ids=["run", "detach"])
def test_a_model_that_could_not_be_opened_starts_no_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., object]
) -> None:
    def connected(*given: object, **named: object) -> None:
        raise AssertionError("Ray was started")

    def outline_model(spec: Spec) -> Never:
        raise JobError("the factory is wrong")

    class Opened(Submission):
        """Its model has been opened, or not, before it goes on."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            with suppress(JobError):
                self._opening.result()

    monkeypatch.setattr("orchestrator.client.running.cluster.connected", connected)
    monkeypatch.setattr("orchestrator.client.running.Submission", Opened)
    monkeypatch.setattr(settling, "outline_model", outline_model)
    with pytest.raises(JobError, match="the factory is wrong"):
        start(tiny(tmp_path, "a"), resume=False, say=print)


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({}, False),
        ({"model": {"family": None, "factory": "users:model"}}, True),
        ({"data": {"source": "users:data"}}, True),
        ({"data": {"source": "text", "path": ("users.txt",)}}, True),
        ({"data": {"tokenizer": "users.json"}}, True),
        ({"model": {"weights": "users.safetensors"}}, True),
    ],
    ids=str,
)
def test_ray_starts_beside_the_opening_of_what_is_freshets_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, dict[str, object]], waits: bool
) -> None:
    started = threading.Event()

    def connected(*given: object, **named: object) -> None:
        started.set()
        raise AssertionError("Ray was started")

    def outline_model(spec: Spec) -> Never:
        started.wait(0.2 if waits else 60)
        raise JobError("the user's own is wrong")

    monkeypatch.setattr("orchestrator.client.running.cluster.connected", connected)
    monkeypatch.setattr(settling, "outline_model", outline_model)
    data = {"source": "python-docs", "path": None, **given.pop("data", {})}
    spec = tiny(tmp_path, "a", data=data, **given)
    with pytest.raises(JobError if waits else AssertionError):
        run(spec, resume=False, observe=print, say=print)


def test_a_job_of_a_local_cluster_cannot_be_left(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="--detach: a local cluster ends with `freshet train`"):
        detach(tiny(tmp_path, "a", cluster={"address": "local"}), resume=False, say=print)
