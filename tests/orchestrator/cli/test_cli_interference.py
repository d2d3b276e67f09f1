"""`freshet interference fit` and `report` on measured windows, and what they answer to files that are none."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.prepare.interference_model import MODEL, model_folder
from planner.features import row
from planner.interference.dataset import ALONE, Windows
from planner.interference.model_file import StoredWindows, load_windows, save_windows
from workers.protocol.errors import JobError


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    others = np.linspace(0.0, 2.0, 60)
    kinds = (ALONE, "compute", "memory")
    measured = Windows(
        rows=np.array([row({"cpu_others": float(load), "work": 0.1}) for load in others]),
        ratios=1 + others,
        kinds=tuple(kinds[number % 3] for number in range(60)),
        levels=("light",) * 60,
    )
    path = tmp_path / "windows.safetensors"
    save_windows(path, StoredWindows(windows=measured, machine="here", warnings=("the machine is busy",)))
    return path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["interference", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_windows_become_a_model_and_a_page(windows: Path, tmp_path: Path) -> None:
    model, page = tmp_path / "forest.safetensors", tmp_path / "page.html"
    said = run("fit", "--windows", windows, "--model", model)
    assert "60 windows; each kind of neighbour was left out once" in said
    assert "warning: the machine is busy" in said
    assert run("report", "--model", model, "--out", page).strip() == f"page: {page}"
    assert "last measured ratio" in page.read_text()


def test_windows_of_a_gpu_become_a_model_of_that_gpu(
    windows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_PROFILES", str(tmp_path / "profiles"))
    save_windows(windows, replace(load_windows(windows), device="cuda"))
    assert f"model: {model_folder('cuda') / MODEL}" in run("fit", "--windows", windows)
    assert not (model_folder("cpu") / MODEL).exists()
    page = tmp_path / "page.html"
    run("report", "--device", "cuda", "--out", page)
    assert "device cuda" in page.read_text()
    with pytest.raises(JobError, match=r"there is no .*freshet interference fit"):
        run("report", "--out", page)


@pytest.mark.parametrize(("device", "option"), [("cpu", ""), ("cuda", " --device cuda")])
def test_what_is_missing_is_made_by_a_command_for_the_same_device(
    device: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_PROFILES", str(tmp_path / "profiles"))
    with pytest.raises(JobError, match=rf"make one with `freshet interference fit{option}`$"):
        run("report", "--device", device, "--out", tmp_path / "page.html")
    with pytest.raises(JobError, match=rf"make one with `freshet interference collect{option}`$"):
        run("fit", "--device", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_measured_on_one(windows: Path) -> None:
    before = windows.read_bytes()
    with pytest.raises(JobError, match=r"--device cuda: torch .* sees no GPU here; .*--device cpu"):
        run("collect", "--device", "cuda", "--windows", windows)
    assert windows.read_bytes() == before


def test_a_place_for_windows_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    with pytest.raises(JobError, match=rf"cannot write {tmp_path}: it is a folder; name a file"):
        run("collect", "--windows", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=rf"cannot write .*windows: {tmp_path}/file is no folder"):
        run("collect", "--windows", tmp_path / "file" / "windows")


def test_files_that_are_no_model_are_refused(windows: Path, tmp_path: Path) -> None:
    model = tmp_path / "forest.safetensors"
    for content, said in (
        (None, "there is no .*freshet interference fit"),
        (pickle.dumps({}), "is no safetensors file"),
        (windows.read_bytes(), "is not what `freshet interference fit` writes"),
    ):
        if content is not None:
            model.write_bytes(content)
        with pytest.raises(JobError, match=said):
            run("report", "--model", model, "--out", tmp_path / "page.html")
    with pytest.raises(JobError, match=r"there is no .*freshet interference collect"):
        run("fit", "--windows", tmp_path / "none", "--model", model)


def test_a_page_that_cannot_be_written_is_said(windows: Path, tmp_path: Path) -> None:
    model = tmp_path / "forest.safetensors"
    run("fit", "--windows", windows, "--model", model)
    with pytest.raises(JobError, match="cannot write"):
        run("report", "--model", model, "--out", tmp_path / "none" / "page.html")
