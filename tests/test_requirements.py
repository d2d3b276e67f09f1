"""The pinned packages: within what pyproject.toml asks for, complete without a search, and for a run no more than it
needs."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN, DEV, PIP = (ROOT / "requirements" / name for name in ("run.txt", "dev.txt", "pip.txt"))
ASKED = {RUN: PROJECT["dependencies"], DEV: PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]}
PYTHONS = ("3.11", "3.12", "3.13")


def lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def pins(file: Path, python: str, system: str = "linux") -> dict[str, Version]:
    """Package -> its version in `file`, under that Python on that system."""
    surroundings: Any = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.7",
        "sys_platform": system,
    }
    found: dict[str, Version] = {}
    for line in map(Requirement, lines(file)):
        (clause,) = line.specifier
        assert clause.operator == "==", line
        if line.marker is None or line.marker.evaluate(surroundings):
            assert canonicalize_name(line.name) not in found, f"{line.name} twice under Python {python}"
            found[canonicalize_name(line.name)] = Version(clause.version)
    return found


def needed(asked: Iterable[str]) -> dict[tuple[str, str], Requirement]:
    """What the installed packages that `asked` leads to need, each with who needs it: (who, requirement) -> it."""
    found: dict[tuple[str, str], Requirement] = {}
    waiting = [("pyproject.toml", Requirement(line)) for line in asked]
    while waiting:
        who, wanted = waiting.pop()
        if (who, str(wanted)) in found:
            continue
        found[who, str(wanted)] = wanted
        try:
            inner = map(Requirement, requires(wanted.name) or ())
        except PackageNotFoundError:
            inner = ()
        for each in inner:
            extras = {"", *wanted.extras}
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((wanted.name, each))
    return found


def unsatisfied(asked: Iterable[str], pinned: Mapping[str, Version]) -> list[str]:
    return [
        f"{who} needs {wanted}, pinned: {pinned.get(canonicalize_name(wanted.name))}"
        for (who, _), wanted in needed(asked).items()
        if (version := pinned.get(canonicalize_name(wanted.name))) is None
        or not wanted.specifier.contains(version, prereleases=True)
    ]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("file", [RUN, DEV], ids=lambda file: file.name)
def test_every_dependency_is_pinned_within_its_range(file: Path, python: str) -> None:
    pinned = pins(file, python)
    for wanted in map(Requirement, ASKED[file]):
        version = pinned.get(canonicalize_name(wanted.name))
        assert version is not None, f"`make requirements`: {wanted.name} is not in {file.name}"
        assert wanted.specifier.contains(version, prereleases=True), (
            f"`make requirements`: {wanted.name}=={version} is not {wanted}"
        )


@pytest.mark.parametrize("file", [RUN, DEV], ids=lambda file: file.name)
def test_the_pins_are_complete_and_go_together(file: Path) -> None:
    python = ".".join(default_environment()["python_version"].split(".")[:2])
    assert unsatisfied(ASKED[file], pins(file, python)) == []


def test_a_pin_that_is_missing_or_too_old_is_found() -> None:
    pinned = pins(RUN, "3.11") | {"click": Version("1.0")}
    del pinned["protobuf"]
    found = unsatisfied(ASKED[RUN], pinned)
    assert any("ray needs protobuf" in line and line.endswith("None") for line in found)
    assert any("needs click" in line and line.endswith("1.0") for line in found)


@pytest.mark.parametrize("python", PYTHONS)
def test_development_runs_what_a_user_runs(python: str) -> None:
    run, dev = pins(RUN, python), pins(DEV, python)
    assert run.items() <= dev.items()


def test_a_run_brings_no_tools_of_development() -> None:
    run = pins(RUN, "3.11")
    tools = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["dev"]}
    # Ray's own needs: Ray Train logs to TensorBoard, and its dashboard speaks TLS, YAML and OpenTelemetry.
    of_ray = {"tensorboardx", "cryptography", "pyyaml", "opentelemetry-sdk", "jsonschema"}
    assert tools & run.keys() <= of_ray


def test_setuptools_is_pinned_because_pip_makes_no_surroundings_for_it() -> None:
    (wanted,) = map(
        Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    )
    assert all(wanted.specifier.contains(pins(RUN, python)[wanted.name]) for python in PYTHONS)


def planned(*targets: str) -> list[str]:
    """The commands with which `make` would make `targets`, out of an empty folder."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "VENV=/nowhere/venv", *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_make_run_installs_what_a_run_needs_and_make_test_the_rest() -> None:
    run = "\n".join(planned("run"))
    assert "requirements/run.txt" in run
    assert "dev.txt" not in run
    assert "[dev]" not in run
    for target in ("test", "check", "bench", "format"):
        commands = "\n".join(planned(target))
        assert "requirements/run.txt" in commands
        assert "--constraint requirements/dev.txt --editable '.[dev]'" in commands


@pytest.mark.parametrize("file", [RUN, DEV, PIP], ids=lambda file: file.name)
def test_make_requirements_wrote_the_pins(file: Path) -> None:
    """Each file names the command that wrote it."""
    command = file.read_text().splitlines()[1].removeprefix("#").strip()
    assert command.startswith("uv pip compile --universal --python-version 3.11 ")
    commands = [line.split("/bin/", 1)[-1] for line in planned("requirements") if "uv pip compile" in line]
    assert command in [line.replace(" --quiet --upgrade", "") for line in commands]
    assert "make requirements" in (ROOT / "docs" / "dependencies.md").read_text()
    assert "make requirements" in (ROOT / "docs" / "deploy.md").read_text()
