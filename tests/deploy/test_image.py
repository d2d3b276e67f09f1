"""The image: hadolint takes the Dockerfile, it runs as nobody special, and manifests name the version of its Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from deployment import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
FINAL_STAGE = DOCKERFILE.split("\nFROM ")[-1]


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


def test_the_manifests_name_the_version_of_ray_that_is_in_the_image() -> None:
    (version,) = re.findall(r"^ray==(\S+)$", (ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE)
    assert f'rayVersion: "{version}"' in (DEPLOY / "kubernetes" / "raycluster.yaml").read_text()
