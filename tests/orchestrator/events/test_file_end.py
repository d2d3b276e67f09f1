"""The end of a file: whole lines, no more than asked for, and nothing but regular files where they are expected."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.events.file_end import FileEnd, file_end


def test_the_end_begins_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a").write_bytes(b"first\nsecond\nthird")
    assert file_end(tmp_path, "logs/a", 100) == FileEnd(b"first\nsecond\nthird", False)
    assert file_end(tmp_path, "logs/a", 18) == FileEnd(b"first\nsecond\nthird", False)
    assert file_end(tmp_path, "logs/a", 10) == FileEnd(b"third", True)
    # One line that is too long is cut anywhere.
    assert file_end(tmp_path, "logs/a", 3) == FileEnd(b"ird", True)


def test_nothing_else_is_read(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        (folder / "logs").mkdir(parents=True)
    (elsewhere / "logs" / "secret").write_text("secret")
    (home / "link").symlink_to(elsewhere / "logs" / "secret")
    (home / "folder").symlink_to(elsewhere / "logs")
    (home / "loop").symlink_to(home / "loop")
    os.mkfifo(home / "pipe")
    for name in ("link", "folder/secret", "loop", "pipe", "logs", "none", "../elsewhere/logs/secret"):
        assert file_end(home, name, 100) is None
    # The folder itself may be reached by a link, as home directories are.
    (tmp_path / "way").symlink_to(elsewhere)
    assert file_end(tmp_path / "way", "logs/secret", 100) == FileEnd(b"secret", False)
