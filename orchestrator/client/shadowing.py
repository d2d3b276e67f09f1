"""Finds user files that hide Freshet's own packages from a cluster's processes. Pure except for looking at files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("planner", "workers", "orchestrator")
OWN = Path(__file__).resolve().parents[2]
"""The folder that holds Freshet's packages."""


def shadowing(paths: Iterable[str]) -> Path | None:
    """The first file or package in the import `paths` that would be imported in place of one of Freshet's."""
    for folder in map(Path, paths):
        if folder.resolve() == OWN:
            return None
        for package in PACKAGES:
            if (folder / package / "__init__.py").is_file():
                return folder / package
            if (folder / f"{package}.py").is_file():
                return folder / f"{package}.py"
    return None
