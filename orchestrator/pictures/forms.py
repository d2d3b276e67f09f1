"""Chooses the format of a picture's file by its suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from workers.protocol.errors import JobError

Form = Callable[[], str]
"""Produces the text of a file."""

SUFFIXES = (".svg", ".html", ".json")
"""An SVG, a page, a trace for Perfetto."""


def check_suffix(path: Path, option: str) -> None:
    """Raises:
    JobError: the suffix of `path`, the value of `option`, is not one of `SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise JobError(f"{option} {path}: the suffix says the form, use one of {', '.join(SUFFIXES)}")


def write_form(path: Path, option: str, forms: Mapping[str, Form]) -> None:
    """Write `path` with the one of `forms` (by suffix) that its suffix names.

    Raises:
        JobError: there is no such form, or the file cannot be written.
    """
    check_suffix(path, option)
    text = forms[path.suffix.lower()]()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot write {option} {path}: {error.strerror or error}") from error
