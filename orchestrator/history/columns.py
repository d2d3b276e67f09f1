"""Long histories as columns in a view's JSON: each field once, with the values of all entries.

A view keeps thousands of steps. An object for each would repeat every field's name, and a float as text takes 19 bytes:
as base64 of little-endian doubles it takes 11, with the same bits, infinities included. Knows no event.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

AT = "at"
"""The column of a series' steps."""


@dataclass(frozen=True)
class Columns:
    """Annotates `list[row]`, or `dict[int, row]`, by step, as columns in JSON."""

    row: type
    """A dataclass of numbers, texts and None, with two fields or more."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.read, serialization=core_schema.plain_serializer_function_ser_schema(self.write)
        )

    def write(self, entries: dict[int, Any] | list[Any]) -> dict[str, Any]:
        """`entries` as columns."""
        if isinstance(entries, dict):
            return {AT: list(entries), **self.write(list(entries.values()))}
        kinds = self._kinds
        found = zip(*map(attrgetter(*kinds), entries), strict=True) if entries else ((),) * len(kinds)
        return {name: _packed(kinds[name], values) for name, values in zip(kinds, found, strict=True)}

    def read(self, columns: Any) -> dict[int, Any] | list[Any]:
        """The entries that `write` wrote.

        Raises:
            ValueError: they are other entries' columns, or not equally long.
        """
        try:
            rows = list(self._rows(columns))
            return rows if AT not in columns else dict(zip(columns[AT], rows, strict=True))
        except (KeyError, TypeError, struct.error) as error:
            raise ValueError(f"no columns of {self.row.__name__}: {error!r}") from None

    def _rows(self, columns: Any) -> Iterator[Any]:
        kinds = self._kinds
        values = [_unpacked(kind, columns[name]) for name, kind in kinds.items()]
        for of_row in zip(*values, strict=True):
            yield self.row(**dict(zip(kinds, of_row, strict=True)))

    @property
    def _kinds(self) -> dict[str, Any]:
        """Field -> its type, as written."""
        return {field.name: field.type for field in fields(self.row)}


def _packed(kind: Any, values: Sequence[Any]) -> Any:
    return b64encode(struct.pack(f"<{len(values)}d", *values)).decode() if kind == "float" else values


def _unpacked(kind: Any, column: Any) -> Sequence[Any]:
    if kind != "float":
        return column
    raw = b64decode(column)
    return struct.unpack(f"<{len(raw) // 8}d", raw)
