"""Files that pages embed: ours are in the wheel, and the chart library comes out of its own package."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import files
from pathlib import Path

from orchestrator.pictures.chart_library import chart_script, chart_style

ROOT = Path(__file__).parents[3]


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


def test_every_curve_of_a_chart_has_a_colour_by_day_and_by_night() -> None:
    """Where a report has no such variable, the curve is drawn in no colour: nobody sees it."""
    script = (ROOT / "orchestrator/pictures/static/charts.js").read_text()
    dashes = re.search(r"const DASHES = \[(.*)\];", script)
    assert dashes is not None
    curves = len(re.findall(r"undefined|\[[^\]]*\]", dashes[1]))
    assert curves > 4
    page = (ROOT / "orchestrator/report/static/page.css").read_text()
    for scheme in page.split("@media (prefers-color-scheme: dark)", 1):
        colours = re.findall(r"--s(\d+): #[0-9a-f]{6};", scheme.split("* {")[0])
        assert [*map(int, colours)] == list(range(curves))


def test_the_chart_library_comes_out_of_the_installed_package_minified_with_its_licence() -> None:
    script = chart_script()
    published = files("uplot-python")
    assert published is not None
    source = next(file for file in published if file.name == "uPlot.iife.js").read_text()
    notice, code = script.split("*/\n", 1)
    assert notice.startswith("/*")
    for words in ("Leon Sorokin", "(MIT Licensed)", "Permission is hereby granted", 'PROVIDED "AS IS"'):
        assert words in notice
    assert code.startswith("var uPlot=")
    assert len(code) < 0.7 * len(source)
    assert ".u-legend" in chart_style()


def test_no_chart_library_lies_in_the_repository() -> None:
    assert not [file for file in (ROOT / "orchestrator").rglob("*") if "uplot" in file.name.lower()]


def test_no_file_ends_the_element_that_holds_it() -> None:
    for file in (ROOT / "orchestrator").rglob("static/**/*.[jc]s*"):
        assert "</" not in file.read_text(), file
    assert "</" not in chart_script() + chart_style()
