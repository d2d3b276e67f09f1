"""Words validation errors of a spec as sentences: the key, the value, what was expected, the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(
    error: ValidationError, spec: type[BaseModel], *, source: str, overridden: Collection[str] = ()
) -> str:
    """One sentence per mistake in `error`, a line each.

    `source` names the file; a mistake in an `overridden` key is attributed to `--set`.
    """
    mistakes: dict[str, list[ErrorDetails]] = {}
    for details in error.errors():
        mistakes.setdefault(".".join(_field_path(spec, details["loc"])), []).append(details)
    return "\n".join(
        f"{f'--set {key}' if key in overridden else source}: {_sentence(spec, key, group)}"
        for key, group in mistakes.items()
    )


def _field_path(spec: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The part of `location` that names sections and keys, without branches of a union and list positions."""
    path: list[str] = []
    section: type[BaseModel] | None = spec
    for part in location:
        if section is None:
            break
        path.append(str(part))
        section = _subsection(section, str(part))
    return path


def _subsection(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = section.model_fields.get(key)
    annotation = field.annotation if field is not None else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _description(spec: type[BaseModel], key: str) -> str:
    *sections, name = key.split(".")
    section = spec
    for part in sections:
        section = _subsection(section, part) or section
    return section.model_fields[name].description or ""


def _sentence(spec: type[BaseModel], key: str, group: list[ErrorDetails]) -> str:
    kind = group[0]["type"]
    if kind == "extra_forbidden":
        return _unknown_key(spec, key)
    if kind == "missing":
        return f"{key} is missing" if "." in key else f"the section [{key}] is missing"
    if kind == "string_pattern_mismatch":
        return f"{key} = {_shown(group[0]['input'])} does not fit. {_description(spec, key)}"
    if kind == "model_type":
        return f"[{key}] should be a section of keys, not {group[0]['input']!r}"
    expected = " or ".join(dict.fromkeys(_expectation(details) for details in group))
    return f"{key} = {_shown(group[0]['input'])}: {expected}"


def _expectation(details: ErrorDetails) -> str:
    text = (
        details["msg"]
        .removeprefix("Input ")
        .replace("valid tuple", "list")
        .replace("valid dictionary", "table")
    )
    positions = [part for part in details["loc"] if isinstance(part, int)]
    return f"item {positions[-1] + 1} {text}" if positions else text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_key(spec: type[BaseModel], key: str) -> str:
    *sections, name = key.split(".")
    section: type[BaseModel] | None = spec
    for part in sections:
        section = _subsection(section, part) if section is not None else None
    known = list(section.model_fields) if section is not None else []
    where = f"[{'.'.join(sections)}] has no key" if sections else "there is no section"
    sentence = f"{where} {name!r}"
    elsewhere = [
        f"[{other}]"
        for other in spec.model_fields
        if (table := _subsection(spec, other)) is not None and name in table.model_fields
    ]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if elsewhere:
        return f"{sentence}; {name!r} belongs to {' or '.join(elsewhere)}"
    if nearest:
        return f"{sentence}; did you mean {nearest[0]!r}?"
    return f"{sentence}; it has {', '.join(known)}"
