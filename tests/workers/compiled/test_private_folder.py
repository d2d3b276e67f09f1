"""The folder of compiled code is this process's alone and goes with it."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from workers.layers.compiled.kernels import PrivateFolder


def test_it_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = PrivateFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "code.so").write_bytes(b"")
    folder.remove()
    assert not folder.path.exists()


def test_a_killed_processs_folder_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = PrivateFolder()
    left = tmp_path / "freshet-compiled-left"
    left.mkdir(0o700)
    (left / "lock").touch()
    (left / "code.so").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "freshet-compiled-link").symlink_to(elsewhere)
    other = PrivateFolder()
    assert not left.exists()
    assert living.path.exists()
    assert elsewhere.exists()
    living.remove()
    other.remove()
