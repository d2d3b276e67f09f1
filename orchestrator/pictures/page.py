"""A page of pictures with nothing from elsewhere, and which text a file gets by its suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from workers.protocol import JobError

Form = Callable[[], str]
"""Makes the text of a file."""


def picture_page(title: str, heading: str, text: str, pictures: Sequence[str]) -> str:
    """HTML with `pictures`, which are SVG, below each other; all else is escaped."""
    figures = "\n".join(f'<div class="wide">{picture}</div>' for picture in pictures)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        "<style>body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; } .wide { overflow-x: auto; }</style>\n"
        f"</head>\n<body>\n<h1>{escape(heading)}</h1>\n<p>{escape(text)}</p>\n"
        f"{figures}\n</body>\n</html>\n"
    )


SUFFIXES = (".svg", ".html", ".json")
"""An SVG, a page, a trace for Perfetto."""


def check_suffix(path: Path, option: str) -> None:
    """Raises:
    JobError: the suffix of `path`, which `option` named, says no form.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise JobError(f"{option} {path}: the suffix says the form, use one of {', '.join(SUFFIXES)}")


def write_form(path: Path, option: str, forms: Mapping[str, Form]) -> None:
    """Write the one of `forms` (by suffix) that the suffix of `path` asks for.

    Raises:
        JobError: there is none, or the file cannot be written.
    """
    check_suffix(path, option)
    text = forms[path.suffix.lower()]()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot write {option} {path}: {error.strerror or error}") from error
