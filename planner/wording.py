"""Numbers with their nouns, as messages of all packages write them."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def named(kind: str, numbers: Iterable[int]) -> str:
    """E.g. `ranks 1, 2`."""
    listed = [str(number) for number in numbers]
    return f"{kind} {listed[0]}" if len(listed) == 1 else f"{kind}s {', '.join(listed)}"
