"""Mistakes in what a client sent, in plain words; and the patterns of texts, each with the words for what it allows.
Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.commands.move import LAYERS

JOB = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
KEY = r"^[\x21-\x7e]{1,200}$"
NAME = r"^[a-z]{1,20}$"
VERSION = r"^\d{1,9}\.\d{1,9}$"
ETAG = r'^"?\d{1,9}\.\d{1,9}"?$'
CUT = r"^(best|keep|\d+( ?[+, ] ?\d+)*)$"
ALLOWED: Mapping[str, str] = {
    JOB: "up to 63 letters, digits, dots, underscores and hyphens, with a letter or a digit first",
    KEY: "1 to 200 visible characters of ASCII, without blanks",
    NAME: "up to 20 small letters",
    VERSION: "a plan's version such as 1.2",
    ETAG: "a plan's version such as 1.2",
    LAYERS: "a layer such as 3, or a run of layers such as 3-4",
    CUT: "best, keep, or layers per stage such as 3+2+1+2",
}
"""Pattern -> what it allows, for people."""
MOST_TOLD = 5
LONGEST = 60
"""Most characters of a wrong value that are repeated."""
_PARTS = ("body", "query", "path", "header")
"""Where FastAPI says that a value came from."""
_BRANCHES = ("constrained-", "literal[")
"""Beginnings of what pydantic calls the branches of a union."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "finite": "a number that is not infinite",
}
"""Prefix of a pydantic error's type -> the expected value, in words."""


def mistakes(errors: Iterable[Mapping[str, Any]], labels: Mapping[str, str] | None = None) -> str:
    """The first mistakes that pydantic found, in words.

    Args:
        labels: field -> its name on the form; without it, fields have the names that programs send.
    """
    places: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for details in errors:
        places.setdefault(_place(details), []).append(details)
    groups = list(places.items())
    said = [_sentence(place, group, labels or {}) for place, group in groups[:MOST_TOLD]]
    left = len(groups) - len(said)
    return "; ".join([*dict.fromkeys(said), *([f"and {left} more"] if left else [])])


def _place(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a mistake is, without the branches of a value that may be of several kinds."""
    place = tuple(str(part) for part in details["loc"] if not str(part).startswith(_BRANCHES))
    return place[1:] if place and place[0] in _PARTS else place


def _sentence(place: tuple[str, ...], group: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    details = group[0]
    kind, context = str(details["type"]), details.get("ctx", {})
    where = ".".join([labels.get(place[0], place[0]), *place[1:]]) if place else "the body"
    match kind:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"there is no field {where}"
        case "json_invalid":
            return f"the body is no JSON: {context.get('error', 'it cannot be read')}"
        case "value_error":
            said = str(context.get("error", details["msg"]))
            return f"{where}: {said}" if place else said
        case _:
            right = " or ".join(_right(str(each["type"]), each.get("ctx", {}), each) for each in group)
            return f"{where} is {_shown(details.get('input'))}, and must be {right}"


def _right(kind: str, context: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """The expected value, in words."""
    bounds = [f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context]
    if bounds:
        return " and ".join(bounds)
    if "min_length" in context or "max_length" in context:
        most = "min_length" not in context
        count = context["max_length" if most else "min_length"]
        unit = "character" if kind.startswith("string") else "entry"
        units = {"character": "characters", "entry": "entries"}[unit] if count != 1 else unit
        return f"{'at most' if most else 'at least'} {count:,} {units} long"
    if kind == "string_pattern_mismatch":
        return ALLOWED.get(str(context.get("pattern")), "written otherwise")
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace(" or ", ", ")
        return f"one of {choices}" if ", " in choices else choices
    kinds = (words for begin, words in _KINDS.items() if kind.startswith(begin))
    message = str(details["msg"])
    return next(kinds, f"right: {message[:1].lower()}{message[1:]}")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
