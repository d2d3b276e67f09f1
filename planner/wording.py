"""Numbers with their nouns and units, as messages write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def named(kind: str, numbers: Iterable[object]) -> str:
    """E.g. `ranks 1, 2`."""
    listed = [str(number) for number in numbers]
    return f"{kind} {listed[0]}" if len(listed) == 1 else f"{kind}s {', '.join(listed)}"


def named_or_counted(kind: str, numbers: Sequence[int], most: int = 8) -> str:
    """E.g. `ranks 1, 2`; if there are more than `most`, `124 ranks`."""
    return named(kind, numbers) if len(numbers) <= most else counted(len(numbers), kind)


def pipelines_text(pipelines: int, replicas: int) -> str:
    """Number of pipelines and of the replicas that they train, to follow the ranks of one; "" for one of one."""
    if replicas == 1:
        return ""
    if pipelines == replicas:
        return f" x {replicas} replicas"
    return f" in {counted(pipelines, 'pipeline')} for {replicas} replicas"


def shares_text(shares: Sequence[int]) -> str:
    """Division of a step among pipelines, as in `Plan.shares`: `10 + 6 microbatches in its pipelines`."""
    return f"{' + '.join(map(str, shares))} microbatches in its pipelines" if shares else "even shares"


def seconds(value_s: float) -> str:
    """Three digits: `183 ms`, `1.83 s`; whole seconds from 1,000 s on."""
    if value_s < 0.9995:
        return f"{value_s * 1e3:.3g} ms"
    return f"{value_s:.3g} s" if value_s < 999.5 else f"{value_s:,.0f} s"


def link_rate(bytes_per_s: float) -> str:
    """Three digits: `20.7 MB/s`; whole MB/s from 1,000 on."""
    value = bytes_per_s / 1e6
    return f"{value:.3g} MB/s" if value < 999.5 else f"{value:,.0f} MB/s"


def some_of(names: Sequence[str]) -> str:
    """Words for what to give, where at least one of `names` is: `a, b or both`, or `one or more of a, b, c`."""
    told = ", ".join(names)
    return f"{told} or both" if len(names) == 2 else f"one or more of {told}"
