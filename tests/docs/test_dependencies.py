"""Every dependency is explained in docs/dependencies.md, and every installed dependency is imported."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "dependencies.md").read_text()
MODULES = {"scikit-learn": "sklearn", "uplot-python": "uplot"}
"""Import names of packages that are imported under another name."""

UNSEEN = {"python-multipart"}
"""Packages that another package imports on our behalf: FastAPI, for forms."""


def names(requirements: list[str]) -> set[str]:
    return {match.group() for line in requirements if (match := re.match(r"[\w-]+", line))}


def explained(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE))


def test_every_dependency_is_explained() -> None:
    assert explained("At run time") == names(PROJECT["dependencies"])
    assert explained("For development") == names(PROJECT["optional-dependencies"]["dev"])


@pytest.mark.parametrize("package", sorted(names(PROJECT["dependencies"]) - UNSEEN))
def test_what_pip_installs_is_imported(package: str) -> None:
    module = MODULES.get(package, package.replace("-", "_"))
    for folder in ("planner", "workers", "orchestrator", "dashboard"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import) and any(
                    name.name.split(".")[0] == module for name in node.names
                ):
                    return
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == module:
                    return
    pytest.fail(f"pip installs {package}, and nothing imports it")
