"""Words validation errors of a spec as sentences: the key, the value, what was expected, the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_NO_FAMILY = "None"
"""The branch of a union that is taken where the spec names no family, as errors spell it."""


@dataclass(frozen=True)
class _Place:
    """The key that an error is about."""

    path: tuple[str, ...]
    """Sections and key, without branches of a union and list positions."""
    section: type[BaseModel]
    """The section around the key."""
    choices: Mapping[str, type[BaseModel]]
    """By family, what this section may be; a section without families is under an empty name."""


def explain(
    error: ValidationError, spec: type[BaseModel], *, source: str, overridden: Collection[str] = ()
) -> str:
    """One sentence per mistake in `error`, a line each.

    `source` names the file; a mistake in an `overridden` key is attributed to `--set`.
    """
    mistakes: dict[str, tuple[_Place, list[ErrorDetails]]] = {}
    for details in error.errors():
        place = _place(spec, details)
        mistakes.setdefault(".".join(place.path), (place, []))[1].append(details)
    return "\n".join(
        f"{f'--set {key}' if key in overridden else source}: {_sentence(spec, key, place, group)}"
        for key, (place, group) in mistakes.items()
    )


def subsections(section: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """The sections that `key` may hold, by family; none if it holds a value."""
    field = section.model_fields.get(key)
    annotation = field.annotation if field is not None else None
    found = (annotation, *get_args(annotation))
    return {_family(each): each for each in found if isinstance(each, type) and issubclass(each, BaseModel)}


def _family(section: type[BaseModel]) -> str:
    field = section.model_fields.get("family")
    return next(iter(get_args(field.annotation)), _NO_FAMILY) if field is not None else ""


def _place(spec: type[BaseModel], details: ErrorDetails) -> _Place:
    found = _Place((), spec, {"": spec})
    section, choices = spec, found.choices
    family = ("family",) if details["type"] == "union_tag_invalid" else ()
    for part in map(str, (*details["loc"], *family)):
        if part in choices:
            section = choices[part]
            continue
        found = _Place((*found.path, part), section, choices)
        choices = subsections(section, part)
        if not choices:
            break
        section = next(iter(choices.values()))
    return found


def _sentence(spec: type[BaseModel], key: str, place: _Place, group: list[ErrorDetails]) -> str:
    kind, value = group[0]["type"], group[0]["input"]
    if kind == "extra_forbidden":
        return _unknown_key(spec, place, value)
    if kind == "missing":
        return f"{key} is missing" if "." in key else f"the section [{key}] is missing"
    if kind == "string_pattern_mismatch":
        return (
            f"{key} = {_shown(value)} does not fit. {place.section.model_fields[place.path[-1]].description}"
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"[{key}] should be a section of keys, not {value!r}"
    if kind == "union_tag_invalid":
        families = _listed((repr(family) for family in place.choices if family != _NO_FAMILY), "or")
        return f"{key} = {_shown(value[place.path[-1]])}: should be {families}"
    if kind == "family_and_factory":
        return group[0]["msg"]
    expected = " or ".join(dict.fromkeys(_expectation(details) for details in group))
    return f"{key} = {_shown(value)}: {expected}"


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


def _unknown_key(spec: type[BaseModel], place: _Place, value: Any) -> str:
    *sections, name = place.path
    family = _family(place.section)
    if having := [other for other, each in place.choices.items() if name in each.model_fields]:
        others = _listed((other if other != _NO_FAMILY else "model.factory" for other in having), "and")
        of_which = ": set model.family, or" if family == _NO_FAMILY else f", not of {family}:"
        return f"model.{name} = {_shown(value)} is a setting of {others}{of_which} remove it"
    asked = place.choices.values() if family == _NO_FAMILY else (place.section,)
    known = list(dict.fromkeys(key for section in asked for key in section.model_fields))
    where = f"[{'.'.join(sections)}] has no key" if sections else "there is no section"
    sentence = f"{where} {name!r}"
    elsewhere = [
        f"[{other}]"
        for other in spec.model_fields
        if any(name in table.model_fields for table in subsections(spec, other).values())
    ]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if elsewhere:
        return f"{sentence}; {name!r} belongs to {' or '.join(elsewhere)}"
    if nearest:
        return f"{sentence}; did you mean {nearest[0]!r}?"
    return f"{sentence}; it has {', '.join(known)}"


def _listed(names: Iterable[str], last: str) -> str:
    """`a, b and c`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end
