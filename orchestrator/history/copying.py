"""A copy of a view that later events do not change: readers in other threads take their time with it.

What cannot change is shared with the original: events, plans and all other frozen values.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})


def copied(value: T) -> T:
    """A copy of `value`, with copies of all dicts, lists, sets and dataclasses in it that may change."""
    found: Any = _copied(value)
    return found


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if kind is list:
        return value[:] if value and type(value[0]) in _ATOMS else [_copied(each) for each in value]
    if kind is set:
        return set(value)
    if (names := _changing(kind)) is None:
        return value
    made = object.__new__(kind)
    for name in names:
        object.__setattr__(made, name, _copied(getattr(value, name)))
    return made


@cache
def _changing(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass that may change; None for any other type."""
    if not dataclasses.is_dataclass(kind) or kind.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return tuple(field.name for field in dataclasses.fields(kind))
