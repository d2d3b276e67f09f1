"""JSON of dataclasses: one strict codec for all that is written to a file or sent to many ranks.

The fields and their types are those of the dataclass, and nobody lists them a second time. What is read has no unknown
field and no value of another type. Nothing is unpickled, and a text never names the class that it becomes. A leaf.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, cached_property
from itertools import accumulate, chain, islice
from operator import sub
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json as json_read
from pydantic_core import to_json as json_written

Record = TypeVar("Record")
NOT_WRITTEN = Field(exclude=True)
"""Annotates a field that no text has: what a dataclass remembers for itself."""
_CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    ser_json_inf_nan="constants",
    ser_json_bytes="base64",
    val_json_bytes="base64",
)


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[tuple[Any]]:
    # In a tuple: a dataclass takes no configuration from outside, and its fields' classes take that of what holds them.
    return TypeAdapter(tuple[kind], config=_CONFIG)  # pyright: ignore[reportInvalidTypeForm]


def to_json(record: Any) -> bytes:
    """Write a dataclass."""
    return _adapter(type(record)).dump_json((record,))[1:-1]


def json_values(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values."""
    return _adapter(type(record)).dump_python((record,), mode="json")[0]


def from_json(kind: type[Record], text: str | bytes) -> Record:
    """The `kind` that `to_json` wrote; fields with a default may be missing.

    Raises:
        ValueError: the text is none; says which field is wrong.
    """
    whole = f"[{text}]" if isinstance(text, str) else b"[%b]" % text
    try:
        return _adapter(kind).validate_json(whole)[0]
    except ValidationError as error:
        raise ValueError(_in_words(error, kind)) from None


def _in_words(error: ValidationError, kind: type[Any]) -> str:
    """The first mistake: its place, the value, what is expected."""
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:])
    place = f"{kind.__name__}{path}"
    match first["type"]:
        case "missing":
            return f"{place} is missing"
        case "unexpected_keyword_argument":
            return f"{place} is unknown: another version wrote it, and can read it"
        case "json_invalid":
            return f"it is no JSON: {first['ctx']['error'] if 'ctx' in first else first['msg']}"
        case _:
            value = repr(first["input"])
            return f"{place} is {value if len(value) <= 40 else f'{value[:40]}…'}: {first['msg']}"


class Packed:
    """A dataclass that is sent to many ranks: packed once, however many they are, and small where its numbers are
    regular, however many it has."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[type[Any], bytes]]:
        return _unpacked, (type(self), self._packed)

    @cached_property
    def _packed(self) -> bytes:
        return zlib.compress(json_written(_with_steps(json_values(self))))


def _unpacked(kind: type[Record], packed: bytes) -> Record:
    values = _without_steps(json_read(zlib.decompress(packed)))
    # Not strict, but for unknown fields: what is packed was checked as it was read, and lists are to become tuples.
    return _adapter(kind).validate_python((values,), strict=False)[0]


def _with_steps(value: Any) -> Any:
    """JSON values, with the differences between neighbours in place of the numbers of a list, or of a list of lists:
    where these are regular differences repeat, and take hardly any bytes once compressed."""
    if isinstance(value, dict):
        assert "" not in value, "the empty key names differences"
        return {key: _with_steps(each) for key, each in value.items()}
    kinds = set(map(type, value)) if isinstance(value, list) else None
    if kinds == {int}:
        return {"": [value[0], *map(sub, value[1:], value)]}
    if kinds == {list} and set(map(type, flat := [*chain.from_iterable(value)])) == {int}:
        return {"": [flat[0], *map(sub, flat[1:], flat)], "of": [*map(len, value)]}
    return [*map(_with_steps, value)] if kinds else value


def _without_steps(value: Any) -> Any:
    """The values of which `_with_steps` made `value`."""
    if isinstance(value, list):
        return [*map(_without_steps, value)]
    if not isinstance(value, dict):
        return value
    if "" not in value:
        return {key: _without_steps(each) for key, each in value.items()}
    flat = accumulate(value[""])
    return [[*islice(flat, count)] for count in value["of"]] if "of" in value else [*flat]
