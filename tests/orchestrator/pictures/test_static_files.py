"""Third-party files that pages embed: they are in the wheel, and identical to the originals."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
UPLOT = ROOT / "orchestrator" / "pictures" / "static" / "uplot"


def test_the_wheel_takes_every_template_and_static_file() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    packaged = {
        file
        for package in (ROOT / "orchestrator").rglob("__init__.py")
        for pattern in patterns
        for file in package.parent.glob(pattern)
        if file.is_file()
    }
    there = {
        file
        for folder in ("templates", "static")
        for path in (ROOT / "orchestrator").rglob(folder)
        for file in path.rglob("*")
        if file.is_file()
    }
    assert len(there) > 10
    assert packaged == there


def test_the_chart_library_is_as_it_was_published() -> None:
    for line in (UPLOT / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest, name
    assert (
        (UPLOT / "uPlot.iife.min.js")
        .read_text()
        .startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    )
    assert "uplot@1.6.32" in (ROOT / "Makefile").read_text()


def test_no_file_ends_the_element_that_holds_it() -> None:
    for file in (ROOT / "orchestrator").rglob("static/**/*.[jc]s*"):
        assert "</" not in file.read_text(), file
