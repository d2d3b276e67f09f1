"""What CI runs: the README's own commands, and where it keeps pictures of the pages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from deployment import ROOT

INSTALLED = ("python3", "chromium", "chromedriver", "systemd-analyze", "prometheus")
"""Programs that CI would install; the test must not."""


def test_ci_tests_and_checks_and_keeps_screenshots_in_a_folder_that_git_ignores(tmp_path: Path) -> None:
    programs = dict.fromkeys(INSTALLED, "") | {
        "apt-get": "exit 1",
        "make": 'echo "make $*: $FRESHET_SCREENSHOTS"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    folder = ROOT / ".artefacts" / "screenshots"
    targets = ("real-packages", "test", "check")
    assert done.stdout.splitlines() == [f"make {target}: {folder}" for target in targets]
    assert "/.artefacts/" in (ROOT / ".gitignore").read_text().splitlines()
