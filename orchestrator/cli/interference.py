"""Runs `freshet interference`: collects windows, fits the model, says how good it is, and makes a page of that."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.prepare.interference_model import MODEL, WINDOWS, model_folder, store
from planner.interference.dataset import DatasetError
from planner.interference.fitting import fit
from planner.interference.judgement import CANDIDATES, Judgement
from planner.interference.model_file import (
    ModelFileError,
    StoredWindows,
    load_forest,
    load_windows,
    save_windows,
)
from planner.wording import counted, seconds
from workers.protocol.errors import JobError


def collect_command(windows: Path | None, rounds: int | None, brief: bool, device: str) -> None:
    """Measure windows of stages on `device` and write them.

    Args:
        windows: None: those of `device` in the user's cache.
        rounds: windows of each stage beside each neighbour; None: as many as suit `brief`.

    Raises:
        JobError: torch sees no such device, a neighbour does not work here, the machine tells nothing, or `windows`
            cannot be written.
    """
    import torch

    from orchestrator.prepare.collecting import ROUNDS, brief_conditions, collect, conditions, usable_cores
    from workers.sampling.sampler import sampler_of

    if device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise JobError(
            f"--device cuda: torch {torch.__version__} ({built}) sees no GPU here; run this on a machine with an NVIDIA"
            " GPU, its driver and a CUDA build of torch, or measure this machine's CPU with --device cpu"
        )
    accelerator = "cuda:0" if device == "cuda" else None
    path = windows or model_folder(device) / WINDOWS
    _refuse(path)  # it takes minutes until there is something to write
    sampler = sampler_of(torch.device(accelerator or "cpu"))
    try:
        collected = collect(
            sampler,
            lambda what: print(f"measuring {what}", flush=True),
            accelerator=accelerator,
            beside=(brief_conditions if brief else conditions)(usable_cores(), accelerator),
            rounds=rounds or (1 if brief else ROUNDS),
            warn=lambda what: print(f"warning: {what}", flush=True),
        )
    except (OSError, RuntimeError) as error:
        raise JobError(f"the windows could not be measured: {error}") from error
    finally:
        sampler.close()
    stored = StoredWindows(
        windows=collected.windows, machine=platform.node(), warnings=collected.warnings, device=device
    )
    with _writing(path):
        save_windows(path, stored)
    print(f"{counted(len(collected.windows), 'window')}: {path}")


def fit_command(windows: Path | None, model: Path | None, device: str) -> None:
    """Fit a forest to stored windows, say how good it is, and write it.

    Args:
        windows: None: those of `device` in the user's cache.
        model: None: the cache's for the device on which the windows were measured.

    Raises:
        JobError: the windows cannot be read, nothing can be fitted to them, or `model` cannot be written.
    """
    try:
        measured = load_windows(windows or model_folder(device) / WINDOWS, device)
        fitted = fit(measured.windows, warnings=measured.warnings)
    except (ModelFileError, DatasetError) as error:
        raise JobError(str(error)) from error
    path = model or model_folder(measured.device) / MODEL
    with _writing(path):
        store(fitted, path, measured)
    for line in fit_lines(fitted.judgement):
        print(line)
    print(f"model: {path}")


def report_command(model: Path | None, out: Path, device: str) -> None:
    """Write the page about a stored model, by default the cache's for `device`.

    Raises:
        JobError: the model cannot be read, or the page cannot be written.
    """
    from orchestrator.report.interference.model_page import write_model_page

    try:
        stored = load_forest(model or model_folder(device) / MODEL, device)
    except ModelFileError as error:
        raise JobError(str(error)) from error
    with _writing(out):
        print(f"page: {write_model_page(stored, out)}")


def _refuse(path: Path) -> None:
    """Raise what writing `path` would raise.

    Raises:
        JobError: it cannot be written.
    """
    if path.parent.exists() and not path.parent.is_dir():
        raise JobError(f"cannot write {path}: {path.parent} is no folder")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise JobError(f"cannot write {path}: it is a folder; name a file, such as {path / WINDOWS}")
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"cannot write {path}: this user may not write to {path.parent}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error


SHOWN = 8
"""Features that are named, of those that matter most."""


def fit_lines(judgement: Judgement) -> Iterator[str]:
    """The scores on neighbours that were left out, the features that matter, the calibration and the latency."""
    yield f"{judgement.windows} windows; each kind of neighbour was left out once, and predicted by the others:"
    for score in judgement.scores:
        kinds = ", ".join(f"{kind} {error:.1%}" for kind, error in score.by_kind)
        yield f"  {score.model:8} R2 {score.r2:.2f}, median error {score.median_error:.1%} ({kinds})"
    named = ", ".join(f"{name} {share:.0%}" for name, share in judgement.importances[:SHOWN])
    yield f"what matters: {named}"
    pairs = ", ".join(
        f"{predicted:.2f} -> {measured:.2f}" for predicted, measured, _ in judgement.calibration
    )
    yield f"predicted -> measured, by fifths: {pairs}"
    yield f"{CANDIDATES} candidates are predicted in {seconds(judgement.latency_s)}"
    for warning in judgement.warnings:
        yield f"warning: {warning}"
