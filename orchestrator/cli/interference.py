"""Runs `freshet interference`: collects windows, fits the model, says how good it is, and makes a page of that."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.cli.text.interference_text import fit_lines
from orchestrator.prepare.interference_model import MODEL, WINDOWS, model_folder, store
from planner.interference.dataset import DatasetError
from planner.interference.fitting import fit
from planner.interference.model_file import (
    ModelFileError,
    StoredWindows,
    load_forest,
    load_windows,
    save_windows,
)
from planner.wording import counted
from workers.protocol import JobError


def collect_command(windows: Path | None, rounds: int, brief: bool) -> None:
    """Measure windows and write them.

    Raises:
        JobError: a neighbour does not work here, the machine tells nothing, or `windows` cannot be written.
    """
    import torch

    from orchestrator.prepare.collecting import brief_conditions, collect, conditions, usable_cores
    from workers.sampling.sampler import sampler_of

    path = windows or model_folder("cpu") / WINDOWS
    with _writing(path):  # it takes minutes until there is something to write
        path.parent.mkdir(parents=True, exist_ok=True)
    sampler = sampler_of(torch.device("cpu"))
    try:
        collected = collect(
            sampler,
            lambda what: print(f"measuring {what}", flush=True),
            beside=(brief_conditions if brief else conditions)(usable_cores()),
            rounds=1 if brief else rounds,
        )
    except (OSError, RuntimeError) as error:
        raise JobError(f"the windows could not be measured: {error}") from error
    finally:
        sampler.close()
    stored = StoredWindows(windows=collected.windows, machine=platform.node(), warnings=collected.warnings)
    with _writing(path):
        save_windows(path, stored)
    for warning in collected.warnings:
        print(f"warning: {warning}")
    print(f"{counted(len(collected.windows), 'window')}: {path}")


def fit_command(windows: Path | None, model: Path | None) -> None:
    """Fit a forest to stored windows, say how good it is, and write it.

    Raises:
        JobError: the windows cannot be read, nothing can be fitted to them, or `model` cannot be written.
    """
    path = model or model_folder("cpu") / MODEL
    try:
        measured = load_windows(windows or model_folder("cpu") / WINDOWS)
        fitted = fit(measured.windows, warnings=measured.warnings)
    except (ModelFileError, DatasetError) as error:
        raise JobError(str(error)) from error
    with _writing(path):
        store(fitted, path, measured.machine)
    for line in fit_lines(fitted.judgement):
        print(line)
    print(f"model: {path}")


def report_command(model: Path | None, out: Path) -> None:
    """Write the page about a stored model.

    Raises:
        JobError: the model cannot be read, or the page cannot be written.
    """
    from orchestrator.report.model_page import write_model_page

    try:
        stored = load_forest(model or model_folder("cpu") / MODEL)
    except ModelFileError as error:
        raise JobError(str(error)) from error
    with _writing(out):
        print(f"page: {write_model_page(stored, out)}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
