"""File operations on a local folder and through pyarrow alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.checkpoint.storage import Folder, LocalFolder, UriFolder, join, open_folder, split
from workers.protocol.errors import JobError


@pytest.fixture(params=["path", "uri"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    location = str(tmp_path / "a/b") if request.param == "path" else f"file://{tmp_path}/a/b"
    opened = open_folder(location)
    assert isinstance(opened, LocalFolder if request.param == "path" else UriFolder)
    return opened


def test_write_read_list_remove_delete(folder: Folder, tmp_path: Path) -> None:
    assert folder.names() == ()
    assert not folder.exists("x")
    folder.delete()
    folder.remove("x")
    folder.write("x", b"one")
    folder.write("x", b"two")
    folder.write("empty", b"")
    folder.child("inner").write("y", b"three")
    assert folder.names() == ("empty", "inner", "x")
    assert (folder.read("x"), folder.read("empty"), folder.child("inner").read("y")) == (
        b"two",
        b"",
        b"three",
    )
    assert (folder.size("x"), folder.size("empty"), folder.size("absent")) == (3, 0, -1)
    assert folder.exists("x")
    assert folder.exists("inner")
    assert (tmp_path / "a/b/x").read_bytes() == b"two"
    with pytest.raises(FileNotFoundError):
        folder.read("absent")
    folder.remove("x")
    assert folder.names() == ("empty", "inner")
    folder.delete()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_write_that_fails_leaves_nothing_and_the_old_file(folder: Folder, tmp_path: Path) -> None:
    folder.write("kept", b"old")
    (tmp_path / "a/b/taken").mkdir()
    (tmp_path / "a/b/taken/inside").write_bytes(b"")
    with pytest.raises(OSError):
        folder.write("taken", b"a file cannot replace a folder that is not empty")
    assert folder.names() == ("kept", "taken")
    (tmp_path / "blocker").write_bytes(b"")
    with pytest.raises(OSError):
        open_folder(str(tmp_path / "blocker/inside")).write("x", b"")
    assert folder.read("kept") == b"old"


@pytest.mark.parametrize(
    ("location", "name", "joined"),
    [
        ("runs/a", "x", "runs/a/x"),
        ("runs/a/", "x", "runs/a/x"),
        ("file:///runs/a/", "x", "file:///runs/a/x"),
        ("s3://bucket/runs?region=eu", "x", "s3://bucket/runs/x?region=eu"),
    ],
)
def test_locations_join_and_split(location: str, name: str, joined: str) -> None:
    assert join(location, name) == joined
    folder, tail = split(joined)
    assert tail == name
    assert join(folder, tail) == joined


def test_a_bare_file_name_is_in_the_current_folder() -> None:
    assert split("model.safetensors") == (".", "model.safetensors")


@pytest.mark.parametrize("location", ["nope://somewhere/run", "file://relative", "s3://"])
def test_a_uri_that_nothing_takes_is_an_error_for_people(location: str) -> None:
    with pytest.raises(JobError, match=f"cannot open {location}: .*; use a local path or a URI such as"):
        open_folder(location)
