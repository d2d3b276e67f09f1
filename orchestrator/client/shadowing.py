"""Finds user files that hide Freshet's own packages from a cluster's processes. Pure except for looking at files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("planner", "workers", "orchestrator", "freshet")
"""Packages that every process of a job imports."""
OWN = Path(__file__).resolve().parents[2]
"""The folder that holds Freshet's packages."""


def shadowing(paths: Iterable[str], packages: Iterable[str] = PACKAGES) -> Path | None:
    """The first file or package in the import `paths` that hides one of Freshet's `packages`."""
    for folder in map(Path, paths):
        if folder.resolve() == OWN:
            return None
        for package in packages:
            if (folder / package / "__init__.py").is_file():
                return folder / package
            if (folder / f"{package}.py").is_file():
                return folder / f"{package}.py"
    return None


def refusal(hidden: Path, importer: str) -> str:
    """Say what `hidden` does, and what to do about it.

    Args:
        importer: from whom it hides Freshet's package, with a verb: "the ranks, which import".
    """
    return (
        f"{hidden} hides a package of Freshet's from {importer} from that folder first: rename it, or start from"
        " another folder"
    )
