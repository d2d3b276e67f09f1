"""Every kind of damage to a checkpoint's files and to its manifest is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from saved_checkpoints import FILES, alter, job_folder, manifest, saved, truncate

from workers.checkpoint.folder import DamagedCheckpointError, checkpoints, read_layer, read_manifest
from workers.checkpoint.manifest import FileRecord, Manifest
from workers.protocol.errors import DamagedCheckpoint


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return job_folder(request.param, tmp_path)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (alter, "was altered"),
        (truncate, "where the manifest says"),
        (lengthen, "where the manifest says"),
        (empty, "has 0 bytes"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_layer_file_is_named(output: str, tmp_path: Path, file: str, damage, problem: str) -> None:
    saved(output, 20)
    damage(tmp_path / "run/checkpoints/step-00000020-gen-1" / file)
    (ref,) = checkpoints(output)
    read = read_manifest(ref)
    damaged = int(file[:3])
    with pytest.raises(DamagedCheckpointError) as error:
        read_layer(ref, read, damaged)
    assert (error.value.damage.path, error.value.damage.file) == (ref.path, file)
    assert problem in error.value.damage.problem
    assert str(error.value) == f"checkpoint {ref.path} is damaged: {file} {error.value.damage.problem}"
    for layer in set(range(3)) - {damaged}:
        read_layer(ref, read, layer)


def test_the_error_travels_between_processes() -> None:
    damage = DamagedCheckpoint(path="run", file="manifest.json", problem="is missing")
    copy = pickle.loads(pickle.dumps(DamagedCheckpointError(damage)))
    assert copy.damage == damage
    assert str(copy) == "checkpoint run is damaged: manifest.json is missing"


def edited(**changes) -> str:
    """The JSON of a good manifest with some fields changed and a matching sha256."""
    good = manifest(20, 1, [FileRecord(name=file, bytes=1, sha256="0" * 64) for file in FILES])
    return Manifest(**{**vars(good), **changes}).to_json()


def without(field: str) -> str:
    fields = json.loads(edited())
    del fields[field]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (edited()[:-20], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (edited().replace("0.1", "0.2"), "was altered"),
        (without("samples"), "was altered"),
        (without("sha256"), "was altered"),
        (without("format"), "is of format None"),
        (edited(format=9), "is of format 9, where this version reads formats 1 to 8"),
        (edited(log_sha256="d6e1"), "has a wrong log_sha256: d6e1"),
        (edited(step=-1), "has a wrong step: -1"),
        (edited(step="20"), "has a wrong step: 20"),
        (edited(samples=True), "has a wrong samples: True"),
        (edited(plan=[]), "has a wrong plan"),
        (edited(layers=("embedding", "../../block", "head")), "has a layer name with other characters"),
        (edited(layers=("embedding", "head", "head")), "names a layer twice"),
        (edited(layers=("embedding", "block-0")), "lists other files than its layers have: 002-head"),
        (edited(files={}), "lists other files than its layers have"),
        (
            edited(files={file: FileRecord(name=file, bytes=1, sha256="0" * 63) for file in FILES}),
            "has a wrong record of 000-embedding.weights",
        ),
        (edited(step=30), "is of step 30, generation 1: the folder was renamed"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, problem: str) -> None:
    saved(str(tmp_path), 20)
    (ref,) = checkpoints(str(tmp_path))
    (Path(ref.path) / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpointError) as error:
        read_manifest(ref)
    assert error.value.damage.file == "manifest.json"
    assert problem in error.value.damage.problem


def test_a_manifest_that_is_gone_or_no_text_is_named(tmp_path: Path) -> None:
    saved(str(tmp_path), 20)
    (ref,) = checkpoints(str(tmp_path))
    path = Path(ref.path) / "manifest.json"
    path.write_bytes(b"\xff" + path.read_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not UTF-8 text"):
        read_manifest(ref)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        read_manifest(ref)


def test_no_value_of_the_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    """The test changes every digit and letter, one after the other."""
    text = edited()
    assert Manifest.from_json(text).to_json() == text
    for at, character in enumerate(text):
        if character.isalnum():
            other = "7" if character != "7" else "8"
            with pytest.raises(ValueError):
                Manifest.from_json(text[:at] + other + text[at + 1 :])


def test_keys_that_are_no_strings_and_tuples_survive(tmp_path: Path) -> None:
    text = edited(spec={"model": {10: "ten", 9: "nine"}, "pipeline": {"partition": (2, 1)}})
    assert Manifest.from_json(text).spec == {
        "model": {"10": "ten", "9": "nine"},
        "pipeline": {"partition": [2, 1]},
    }
    with pytest.raises(ValueError, match="JSON"):
        edited(spec={"lr": float("nan")})
