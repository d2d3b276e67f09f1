"""Obtains this machine's interference model: from the user's cache, or by measurements beside real neighbours."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from orchestrator.cluster.connection import import_paths
from orchestrator.prepare.profile_cache import cache_folder
from orchestrator.prepare.profiling import machine_key
from planner.features import VERSION
from planner.interference.dataset import DatasetError
from planner.interference.fitting import Fit, fit
from planner.interference.model_file import (
    ModelFileError,
    StoredForest,
    StoredWindows,
    forest_bytes,
    load_forest,
    load_windows,
    save_forest,
)
from planner.interference.predictor import Predictor

MEASUREMENT = 2
"""Version of what is measured and how; a new version invalidates old models."""
MEASURED = ("cpu", "cuda")
"""Devices beside whose stages neighbours can be measured."""
MODEL, WINDOWS = "forest.safetensors", "windows.safetensors"
"""Names of the files in a model's folder."""
LONGEST_S = 115.0
"""A measurement that takes longer is ended."""

Say = Callable[[str], None]
"""Receives phases in words."""


@dataclass(frozen=True, kw_only=True)
class InterferenceModel:
    """A forest for this machine."""

    stored: StoredForest

    @property
    def predictor(self) -> Predictor:
        return Predictor(self.stored.forest)

    def to_bytes(self) -> bytes:
        """For another process; `planner.interference.model_file.forest_from` reads it."""
        return forest_bytes(self.stored)


def interference_model(
    device: str = "cpu",
    *,
    make: bool = True,
    folder: Path | None = None,
    say: Say = lambda text: None,
    measure: Callable[[Path, Say], None] | None = None,
) -> tuple[InterferenceModel | None, str]:
    """The model for the ranks on `device` of this machine, and where it comes from; or None, and why there is none.

    Without one, the planner goes by the ratios that ranks measure. A model for GPUs is never made here: people ask for
    it with `freshet interference collect --device cuda`.

    Args:
        device: `cpu`, `cuda` or `emulated`, as `cluster.device` of a settled spec.
        make: if the cache has none, measure and fit one; takes up to two minutes.
        folder: of this machine's model; None: see `model_folder`.
        measure: writes windows to a file; None: beside real neighbours, in a process of its own.
    """
    if device not in MEASURED:
        return None, f"no interference model: neighbours are not measured on {device} devices"
    place = folder or model_folder(device)
    path = place / MODEL
    try:
        return _loaded(path, device)
    except ModelFileError as error:
        unusable = str(error)
    if device == "cuda":
        return None, (
            f"no interference model: {unusable}. A job makes none for GPUs: measure with `freshet interference collect"
            " --device cuda`, then `freshet interference fit --device cuda`"
        )
    if not make:
        return None, f"no interference model: {unusable}"
    try:
        with _alone_in(place):
            try:  # another job may have made it meanwhile
                return _loaded(path, device)
            except ModelFileError:
                _make(place, path, say, measure or _measure)
                return _loaded(path, device)
    except (OSError, ModelFileError, DatasetError, subprocess.SubprocessError) as error:
        return None, f"no interference model: it could not be made: {error}"


def model_folder(device: str) -> Path:
    """The folder of windows and model for `device` of this machine, in the user's cache."""
    from workers.devices.machine import cpu_name, visible_gpus

    gpus = visible_gpus() if device == "cuda" else ()
    depends = [
        VERSION,
        MEASUREMENT,
        device,
        version("torch"),
        *machine_key(cpu_name(), os.cpu_count() or 1, gpus),
    ]
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]
    return cache_folder(os.environ).parent / "interference" / key


def store(fitted: Fit, path: Path, measured: StoredWindows) -> StoredForest:
    """Write what was fitted to `measured`, and return it as it was written."""
    stored = StoredForest(
        forest=fitted.forest,
        machine=measured.machine,
        device=measured.device,
        made=date.today().isoformat(),
        judgement=fitted.judgement,
    )
    save_forest(path, stored)
    return stored


def _loaded(path: Path, device: str) -> tuple[InterferenceModel, str]:
    stored = load_forest(path, device)
    if stored.device != device:
        raise ModelFileError(f"{path} was measured on device {stored.device}: it says nothing about {device}")
    judgement = stored.judgement
    words = (
        f"interference model of {stored.made}: median error {judgement.forest.median_error:.1%} beside neighbours"
        " that it has not seen"
    )
    return InterferenceModel(stored=stored), "; ".join((words, *judgement.warnings))


def _make(folder: Path, path: Path, say: Say, measure: Callable[[Path, Say], None]) -> None:
    say("making an interference model of this machine, once; up to two minutes")
    windows = folder / WINDOWS
    measure(windows, say)
    measured = load_windows(windows)
    store(fit(measured.windows, warnings=measured.warnings), path, measured)


def _measure(path: Path, say: Say) -> None:
    """Measure in a process of its own: its one torch thread and its neighbours leave nothing in this one."""
    command = [
        sys.executable,
        "-u",  # what it says comes as it says it, and a failure last
        "-m",
        "orchestrator",
        "interference",
        "collect",
        "--brief",
        "--windows",
        str(path),
    ]
    measuring = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_paths())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = threading.Timer(LONGEST_S, measuring.kill)
    limit.start()
    try:
        last = ""
        assert measuring.stdout is not None
        for line in measuring.stdout:
            say(last := line.strip())
        if measuring.wait():
            raise subprocess.SubprocessError(last or f"exit code {measuring.returncode}")
    finally:
        limit.cancel()
        measuring.kill()
        measuring.wait()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process makes a model in `folder` while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
