"""A job's newest complete checkpoint as one file of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from saved_checkpoints import FILES, alter, job_folder, saved, truncate

from workers.checkpoint.folder import checkpoint_folder, export
from workers.protocol.errors import DamagedCheckpoint, JobError


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return job_folder(request.param, tmp_path)


def test_export_writes_one_file(output: str, tmp_path: Path) -> None:
    saved(output, 20)
    states = saved(output, 40)
    out_file = tmp_path / "deep/er/model.safetensors"
    step, tensors, size = export(output, str(out_file))
    assert (step, tensors, size) == (40, 3 * (5 + 3), out_file.stat().st_size)
    assert [path.name for path in out_file.parent.iterdir()] == ["model.safetensors"]
    with safe_open(out_file, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "40", "name": "rehearsal"}
        assert len(file.keys()) == tensors
        for state in states:
            for key, tensor in {**state.weights, **state.buffers}.items():
                assert torch.equal(file.get_tensor(f"{state.name}.{key}"), tensor)


def test_export_takes_the_one_before_a_damaged_one(output: str, tmp_path: Path) -> None:
    for step in (20, 40, 60):
        saved(output, step)
    alter(tmp_path / "run/checkpoints/step-00000060-gen-1/manifest.json")
    (tmp_path / "run/checkpoints/step-00000040-gen-1" / FILES[2]).unlink()
    damages: list[DamagedCheckpoint] = []
    step, _, _ = export(output, str(tmp_path / "model.safetensors"), damages.append)
    assert step == 20
    assert [(d.path, d.file) for d in damages] == [
        (checkpoint_folder(output, 60, 1), "manifest.json"),
        (checkpoint_folder(output, 40, 1), FILES[2]),
    ]
    truncate(tmp_path / "run/checkpoints/step-00000020-gen-1" / FILES[4])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(JobError, match=r"no checkpoint of .* can be exported: .*manifest.json.*is missing"):
        export(output, str(tmp_path / "model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()


def test_export_of_nothing_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no checkpoint: set checkpoint\.every_steps"):
        export(str(tmp_path), str(tmp_path / "model.safetensors"))
