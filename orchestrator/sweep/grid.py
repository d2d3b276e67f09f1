"""The cells of a sweep: every combination of the values of some keys, with each seed. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from orchestrator.spec.job_spec import parse_override
from workers.protocol.errors import JobError

LONGEST = 100
"""Most characters of a cell's name: it is the name of a folder."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of a sweep."""

    settings: tuple[tuple[str, str], ...]
    """(key, value as it was given) of each key of the grid, in its order."""
    seed: int | None = None
    """`job.seed`; None: the spec's own."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the spec: `--set` of `freshet train`."""
        seed = () if self.seed is None else (f"job.seed={self.seed}",)
        return (*(f"{key}={value}" for key, value in self.settings), *seed)

    @property
    def name(self) -> str:
        """Name of its folder: what differs between cells."""
        told = [f"{key.rpartition('.')[2]}={value}" for key, value in self.settings]
        told += [] if self.seed is None else [f"seed={self.seed}"]
        return re.sub(r"[^A-Za-z0-9._=+-]+", "-", ",".join(told).replace(",", "_"))[:LONGEST].strip("-")


def cells_of(grid: Sequence[str], seeds: int | None = None) -> tuple[Cell, ...]:
    """The cells, the last key changing first; the seeds of a setting come one after the other.

    Args:
        grid: `KEY=VALUE,VALUE...` of each key; a value with commas in brackets is one.
        seeds: number of seeds of each setting, from 0 on; None: the spec's own.

    Raises:
        JobError: a key without values or given twice, two equal values, or two cells of one name.
    """
    axes: list[tuple[str, tuple[str, ...]]] = []
    for text in grid:
        key, equals, told = text.partition("=")
        values = tuple(_values(told))
        if not equals or not values or not all(values):
            raise JobError(f"--grid {text}: give a key and its values, as in --grid freeze.r_max=0.2,0.5,0.8")
        for value in values:
            parse_override(f"{key}={value}")
        if len({*values}) < len(values):
            raise JobError(f"--grid {text}: a value is there twice")
        axes.append((key.strip(), values))
    keys = [key for key, _ in axes]
    if not keys:
        raise JobError("a sweep needs a --grid, as in --grid freeze.r_max=0.2,0.5,0.8")
    if len({*keys}) < len(keys):
        raise JobError(f"--grid names a key twice: {', '.join(keys)}; give all its values at once")
    if seeds is not None and "job.seed" in keys:
        raise JobError("--seeds and --grid job.seed both say the seeds: leave one out")
    cells = tuple(
        Cell(settings=tuple(zip(keys, values, strict=True)), seed=seed)
        for values in product(*(values for _, values in axes))
        for seed in ([None] if seeds is None else range(seeds))
    )
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(
            f"two cells of the grid would have the folder {twice!r}: give values that differ by name"
        )
    return cells


def _values(text: str) -> list[str]:
    """The values between commas, but for those in brackets or quotes."""
    values, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]
