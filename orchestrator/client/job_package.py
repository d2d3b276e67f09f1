"""Contents of a submitted job: its command and its runtime environment. Reads the spec, sends nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.client.shadowing import OWN
from orchestrator.spec.job_spec import load
from workers.protocol.errors import JobError

EXCLUDED = ("/runs/",)
"""Parts of a working directory that stay here, beside Ray's own list (`.git`, virtual environments) and the entries of
its `.gitignore` and `.rayignore`."""
PACKAGES = ("orchestrator", "workers", "planner", "dashboard")
"""Packages that the command imports; its own one first, see `shadowing`."""


@dataclass(frozen=True, kw_only=True)
class JobPackage:
    """A job that is ready to be sent."""

    name: str
    command: str
    """For the shell of the cluster, run in its copy of the working directory."""
    runtime_env: Mapping[str, Any]


def job_package(
    path: Path,
    overrides: Sequence[str],
    *,
    working_dir: Path,
    resume: bool = False,
    name: str | None = None,
) -> JobPackage:
    """The job of the TOML file `path` with `overrides`, for a cluster that Ray runs.

    Args:
        working_dir: the folder that the cluster gets a copy of.
        resume: continue from the newest checkpoint in the job's folder.
        name: another name than the spec's.

    Raises:
        JobError: the spec or an override is wrong, the spec is not in `working_dir`, or the job's folder would be in
            the cluster's copy of that folder, which Ray deletes.
    """
    named = [f"job.name={name}"] if name is not None else []
    overrides = ["cluster.address=auto", *overrides, *named]
    spec = load(path, overrides)
    root = working_dir.resolve()
    if not root.is_dir():
        raise JobError(f"--working-dir {working_dir}: there is no such folder")
    if not path.resolve().is_relative_to(root):
        raise JobError(
            f"{path} is not in --working-dir {working_dir}, which is all that the cluster gets: name a folder that"
            " holds the spec and the user code"
        )
    folder = spec.job.folder
    if "://" not in folder and not Path(folder).is_absolute():
        raise JobError(
            f"job.output = {folder!r} would lie in the cluster's copy of {working_dir}, which Ray deletes after the"
            " job: name a folder that stays, which all nodes see, or a URI, with --set job.output=/PATH"
        )
    command = ["python", "-m", "orchestrator", "train", str(path.resolve().relative_to(root))]
    command += [part for override in overrides for part in ("--set", override)]
    command += ["--resume"] if resume else []
    return JobPackage(name=spec.job.name, command=shlex.join(command), runtime_env=_runtime_env(root))


def _runtime_env(root: Path) -> dict[str, Any]:
    """The runtime environment: `root`, and Freshet itself where `root` does not hold it."""
    environment: dict[str, Any] = {"working_dir": str(root), "excludes": list(EXCLUDED)}
    if not all((root / package / "__init__.py").is_file() for package in PACKAGES):
        environment["py_modules"] = [str(OWN / package) for package in PACKAGES]
    return environment
