"""Runs `freshet interference`: collects windows, fits the model, and says how good it is."""

from __future__ import annotations

import platform
from pathlib import Path

from orchestrator.cli.text.interference_text import fit_lines
from orchestrator.prepare.interference_model import model_folder, store
from planner.interference.dataset import DatasetError
from planner.interference.fitting import fit
from planner.interference.model_file import ModelFileError, load_windows, save_windows
from planner.wording import counted
from workers.protocol import JobError


def collect_command(windows: Path | None, rounds: int) -> None:
    """Measure windows and write them."""
    from orchestrator.prepare.collecting import collect
    from workers.sampling.host import HostReader

    path = windows or model_folder("cpu") / "windows.safetensors"
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
    path = model or model_folder("cpu") / "forest.safetensors"
    try:
        measured, machine = load_windows(windows or model_folder("cpu") / "windows.safetensors")
        fitted = fit(measured)
    except (ModelFileError, DatasetError) as error:
        raise JobError(str(error)) from error
    store(fitted, path, machine)
    for line in fit_lines(fitted):
        print(line)
    print(f"model: {path}")
