"""Every dependency is explained in docs/dependencies.md, and every installed dependency is imported."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
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


@cache
def imported() -> frozenset[str]:
    """The outermost packages that Freshet's modules import."""
    found: set[str] = set()
    for folder in ("planner", "workers", "orchestrator", "dashboard"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case ast.Import(names=names):
                        found |= {name.name.split(".")[0] for name in names}
                    case ast.ImportFrom(module=str(module)):
                        found.add(module.split(".")[0])
                    case _:
                        pass
    return frozenset(found)


# One process reads all modules for all packages.
@pytest.mark.xdist_group("test_dependencies")
@pytest.mark.parametrize("package", sorted(names(PROJECT["dependencies"]) - UNSEEN))
def test_what_pip_installs_is_imported(package: str) -> None:
    module = MODULES.get(package, package.replace("-", "_"))
    assert module in imported(), f"pip installs {package}, and nothing imports it"
