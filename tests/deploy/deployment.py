"""The files of `deploy/`, as the tests of this folder read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deploy.md"
OWN_FOLDERS = ("grafana", "prometheus")
"""Folders of `deploy/` that other tests check."""


def documents(path: str) -> list[dict[str, Any]]:
    """The YAML documents of a file in `deploy/`."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def document(path: str) -> dict[str, Any]:
    """The only YAML document of a file in `deploy/`."""
    (only,) = documents(path)
    return only


def files() -> list[Path]:
    """Every file of `deploy/` that this folder's tests check."""
    return sorted(
        file
        for file in DEPLOY.rglob("*")
        if file.is_file() and file.relative_to(DEPLOY).parts[0] not in OWN_FOLDERS
    )


def kubernetes() -> list[dict[str, Any]]:
    """Every object of `deploy/kubernetes/`, without the kustomization."""
    return [
        found
        for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for found in documents(f"kubernetes/{file.name}")
        if found["kind"] != "Kustomization"
    ]


def pod_templates() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod templates of `deploy/kubernetes/`, with a name for messages."""
    for found in kubernetes():
        spec = found["spec"]
        match found["kind"]:
            case "RayCluster":
                yield "head", spec["headGroupSpec"]["template"]
                for group in spec["workerGroupSpecs"]:
                    yield group["groupName"], group["template"]
            case "RayJob":
                yield "submitter", spec["submitterPodTemplate"]
            case "Deployment":
                yield "service", spec["template"]


def strings(value: Any) -> Iterator[str]:
    """Every text in a YAML value; a list of texts also counts as one command line."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)
