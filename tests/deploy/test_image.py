"""The image: hadolint takes the Dockerfile, it runs as nobody special, and its packages are pinned within what
pyproject.toml asks for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from deployment import DEPLOY, PAGE, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
FINAL_STAGE = DOCKERFILE.split("\nFROM ")[-1]
REQUIREMENTS = (DEPLOY / "requirements.txt").read_text().splitlines()


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold=style", DEPLOY / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    slip = tmp_path / "Dockerfile"
    slip.write_text(
        DOCKERFILE.replace("python:3.12.12-slim-bookworm\n", "python\n").replace("--no-cache-dir", "")
    )
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", slip], capture_output=True, text=True)
    assert done.returncode != 0
    assert "DL3042" in done.stdout


def test_the_base_is_a_full_version() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2


def test_the_image_runs_without_root_and_is_watched() -> None:
    assert re.findall(r"^USER (.*)$", FINAL_STAGE, re.MULTILINE) == ["10001:10001"]
    assert "/healthz" in FINAL_STAGE.split("HEALTHCHECK")[1].split("\nCMD")[0]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    ignored, *allowed = [
        line
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#") and not line.startswith("**/")
    ]
    assert ignored == "*"
    copied = {
        word.rstrip("/")
        for words in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in words.split()
    }
    assert {line.removeprefix("!") for line in allowed} == copied
    assert all((ROOT / name).exists() for name in copied)
    assert not [name for name in copied if fnmatch(name, "*token*")]


def pins() -> dict[str, str]:
    """Package -> its version in deploy/requirements.txt."""
    lines = [Requirement(line) for line in REQUIREMENTS if line and not line.startswith("#")]
    assert all([clause.operator for clause in line.specifier] == ["=="] for line in lines)
    return {canonicalize_name(line.name): next(iter(line.specifier)).version for line in lines}


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    assert "pytest" not in pinned
    for line in project["dependencies"]:
        wanted = Requirement(line)
        version = pinned.get(canonicalize_name(wanted.name))
        assert version is not None, f"`make requirements`: {wanted.name} is not in deploy/requirements.txt"
        assert wanted.specifier.contains(version), (
            f"`make requirements`: {wanted.name}=={version} is not {wanted}"
        )


def test_the_command_that_wrote_the_pins_is_that_of_make_and_of_the_page() -> None:
    command = REQUIREMENTS[1].removeprefix("#").strip()
    assert command.startswith("uv pip compile ")
    assert "--python-version 3.12" in command
    assert command.removeprefix("uv pip compile ") in (ROOT / "Makefile").read_text()
    assert "make requirements" in PAGE.read_text()


def test_the_manifests_name_the_version_of_ray_that_is_in_the_image() -> None:
    assert f'rayVersion: "{pins()["ray"]}"' in (DEPLOY / "kubernetes" / "raycluster.yaml").read_text()
