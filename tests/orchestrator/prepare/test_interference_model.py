"""A machine's model is made once, kept and checked; without one there is a reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.prepare import interference_model as rooms
from orchestrator.prepare.interference_model import MODEL, Say, interference_model, model_folder, store
from planner.features import row
from planner.interference.dataset import ALONE, Windows
from planner.interference.fitting import fit
from planner.interference.model_file import (
    StoredWindows,
    forest_from,
    load_forest,
    load_windows,
    save_forest,
    save_windows,
)

KINDS = (ALONE, "compute", "memory")


def measures(*kinds: str) -> Callable[[Path, Say], None]:
    """Writes windows of a machine that slows down by what others take of its CPU."""

    def write(path: Path, say: Say) -> None:
        say("measuring")
        others = np.linspace(0.0, 2.0, 60)
        rows = np.array([row({"cpu_others": float(load), "work": 0.1}) for load in others])
        names = tuple(kinds[number % len(kinds)] for number in range(60))
        windows = Windows(rows=rows, ratios=1 + others, kinds=names, levels=("light",) * 60)
        save_windows(path, StoredWindows(windows=windows, machine="here", warnings=("the machine is busy",)))

    return write


def never(path: Path, say: Say) -> None:
    raise AssertionError("nothing is to be measured")


def test_a_model_is_made_once_and_then_found(tmp_path: Path) -> None:
    said: list[str] = []
    made, reason = interference_model(folder=tmp_path, say=said.append, measure=measures(*KINDS))
    assert made is not None
    assert said == ["making an interference model of this machine, once; up to two minutes", "measuring"]
    assert reason.startswith(f"interference model of {made.stored.made}: median error ")
    assert reason.endswith("; the machine is busy")
    found, again = interference_model(folder=tmp_path, measure=never)
    assert found is not None
    assert again == reason
    (slow, fast), *_ = found.predictor.slowdowns([{"work": 0.1}], [{"cpu_others": 1.9}, {"cpu_others": 0.1}])
    assert slow > 2.5
    assert fast < 1.5
    sent = forest_from(found.to_bytes(), "a message")
    assert np.array_equal(sent.forest.value, made.stored.forest.value)


def test_an_altered_model_is_made_again_or_refused(tmp_path: Path) -> None:
    interference_model(folder=tmp_path, measure=measures(*KINDS))
    path = tmp_path / "forest.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    model, reason = interference_model(folder=tmp_path, make=False, measure=never)
    assert model is None
    assert "was altered or damaged" in reason
    model, _ = interference_model(folder=tmp_path, measure=measures(*KINDS))
    assert model is not None
    assert load_forest(path).judgement.forest.median_error >= 0


def fails(path: Path, say: Say) -> None:
    raise subprocess.SubprocessError("no neighbour began")


@pytest.mark.parametrize(
    ("device", "measure", "reason"),
    [
        ("emulated", never, "neighbours are not measured on emulated devices"),
        ("cuda", never, "A job makes none for GPUs: .*freshet interference collect --device cuda"),
        ("cpu", fails, "it could not be made: no neighbour began"),
        ("cpu", measures(ALONE, "compute"), r"two kinds of neighbours are needed.*there: compute"),
    ],
)
def test_without_a_model_there_is_a_reason(
    device: str, measure: Callable[[Path, Say], None], reason: str, tmp_path: Path
) -> None:
    model, said = interference_model(device, folder=tmp_path, measure=measure)
    assert model is None
    assert said.startswith("no interference model: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(said)


def test_a_cache_that_cannot_be_written_leaves_the_job_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, reason = interference_model(folder=tmp_path / "file" / "folder", measure=never)
    assert model is None
    assert "cannot read" in reason or "could not be made" in reason


def test_a_model_is_of_one_machine_and_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRESHET_PROFILES", str(tmp_path / "profiles"))
    here = model_folder("cpu")
    assert here.parent == tmp_path / "interference"
    assert model_folder("cpu") == here
    monkeypatch.setattr(rooms, "MEASUREMENT", 0)
    assert model_folder("cpu") != here


def test_a_model_is_of_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRESHET_PROFILES", str(tmp_path / "profiles"))
    on_cpu, on_gpu = model_folder("cpu") / MODEL, model_folder("cuda") / MODEL
    assert on_cpu != on_gpu
    measures(*KINDS)(tmp_path / "windows", lambda text: None)
    measured = load_windows(tmp_path / "windows")
    assert measured.device == "cpu"
    fitted = fit(measured.windows)
    of_cpu = store(fitted, on_cpu, measured)
    assert interference_model("cuda", measure=never)[0] is None

    of_gpu = store(fitted, on_gpu, replace(measured, device="cuda"))
    for device in ("cpu", "cuda"):
        model, _ = interference_model(device, measure=never)
        assert model is not None
        assert model.stored.device == device

    save_forest(on_gpu, of_cpu)
    save_forest(on_cpu, of_gpu)
    model, why = interference_model("cuda", measure=never)
    assert model is None
    assert "was measured on device cpu: it says nothing about cuda" in why
    model, why = interference_model("cpu", make=False)
    assert model is None
    assert "was measured on device cuda: it says nothing about cpu" in why


def test_a_measurement_that_fails_says_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator" / "__init__.py").touch()
    (tmp_path / "orchestrator" / "__main__.py").write_text("print('measuring'); raise SystemExit('no CPU')")
    monkeypatch.setattr(rooms, "import_paths", lambda: [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    model, reason = interference_model(folder=tmp_path / "models", say=said.append)
    assert model is None
    assert reason == "no interference model: it could not be made: no CPU"
    assert said[1:] == ["measuring", "no CPU"]
