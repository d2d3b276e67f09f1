"""What a submitted job takes along, and what is refused before anything is sent."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tiny_jobs import write_spec

from orchestrator.client.job_package import PACKAGES, job_package
from orchestrator.client.shadowing import OWN
from workers.protocol.errors import JobError

OUTPUT = "job.output=/shared/run"


def test_a_folder_of_the_users_goes_with_freshets_packages(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    spec = write_spec(tmp_path / "specs", "mine")
    made = job_package(spec, [OUTPUT, "data.path=a b"], working_dir=tmp_path, resume=True, name="other")
    assert made.name == "other"
    assert shlex.split(made.command) == [
        *("python", "-m", "orchestrator", "train", "specs/mine.toml"),
        *("--set", "cluster.address=auto", "--set", OUTPUT, "--set", "data.path=a b"),
        *("--set", "job.name=other", "--resume"),
    ]
    assert made.runtime_env["working_dir"] == str(tmp_path)
    assert made.runtime_env["py_modules"] == [str(OWN / package) for package in PACKAGES]


def test_a_clone_of_the_repository_goes_alone() -> None:
    made = job_package(OWN / "examples" / "gpt.toml", [OUTPUT], working_dir=OWN)
    assert made.name == "gpt"
    assert "train examples/gpt.toml" in made.command
    assert "--resume" not in made.command
    assert "py_modules" not in made.runtime_env


def test_what_the_cluster_could_not_run_is_refused_here(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "mine")
    inside = tmp_path / "inside"
    with pytest.raises(JobError, match=r"--working-dir .*inside: there is no such folder"):
        job_package(spec, [OUTPUT], working_dir=inside)
    inside.mkdir()
    with pytest.raises(JobError, match=r"mine\.toml is not in --working-dir"):
        job_package(spec, [OUTPUT], working_dir=inside)
    with pytest.raises(JobError, match=r"job\.output = 'runs/mine' would lie in .* --set job\.output=/PATH"):
        job_package(spec, [], working_dir=tmp_path)
    with pytest.raises(JobError, match=r"did you mean .?steps"):
        job_package(spec, [OUTPUT, "job.step=3"], working_dir=tmp_path)
    assert job_package(spec, ["job.output=s3://bucket/run"], working_dir=tmp_path).name == "mine"
