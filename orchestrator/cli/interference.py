"""Runs `freshet interference`: collects windows, fits the model, and says how good it is."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

from orchestrator.cli.text.interference_text import fit_lines
from orchestrator.prepare.profiling import cache_folder
from planner.interference.dataset import DatasetError
from planner.interference.fitting import fit
from planner.interference.model_file import (
    ModelFileError,
    StoredForest,
    load_windows,
    save_forest,
    save_windows,
)
from planner.wording import counted
from workers.protocol import JobError


def collect_command(windows: Path | None, rounds: int) -> None:
    """Measure windows and write them."""
    from orchestrator.prepare.collecting import collect
    from workers.sampling.host import HostReader

    path = windows or cached("windows")
    collected = collect(HostReader().read, lambda what: print(f"measuring {what}", flush=True), rounds=rounds)
    save_windows(path, collected.windows, platform.node())
    for warning in collected.warnings:
        print(f"warning: {warning}")
    print(f"{counted(len(collected.windows), 'window')}: {path}")


def fit_command(windows: Path | None, model: Path | None) -> None:
    """Fit a forest to stored windows, say how good it is, and write it.

    Raises:
        JobError: the windows cannot be read, or nothing can be fitted to them.
    """
    path = model or cached("forest")
    try:
        measured, machine = load_windows(windows or cached("windows"))
        fitted = fit(measured)
    except (ModelFileError, DatasetError) as error:
        raise JobError(str(error)) from error
    save_forest(path, StoredForest(forest=fitted.forest, machine=machine, made=date.today().isoformat()))
    for line in fit_lines(fitted):
        print(line)
    print(f"model: {path}")


def cached(name: str) -> Path:
    """The file in this user's cache."""
    return cache_folder(os.environ).parent / "interference" / f"{name}.safetensors"
