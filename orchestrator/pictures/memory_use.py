"""The uses of a rank's memory, as all pictures show them: their parts, their colours, and sizes as text.

Draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.pictures.spans import COLOURS
from planner.ir import ActionKind
from planner.simulation.memory import MemoryParts, OverTime


@dataclass(frozen=True)
class MemoryUse:
    """Parts of the memory that are shown together."""

    name: str
    colour: str
    parts: tuple[str, ...]
    """Fields of `MemoryParts`."""


# A use that changes in a step has the colour of the actions that create it, and is drawn above those that do
# not.
USES = (
    MemoryUse("weights", "#8793a3", ("weights",)),
    MemoryUse("optimizer", COLOURS[ActionKind.UPDATE], ("optimizer",)),
    MemoryUse("standbys", "#d9dde2", ("standbys",)),
    MemoryUse("gradients", COLOURS[ActionKind.BACKWARD], ("gradients",)),
    MemoryUse("activations", COLOURS[ActionKind.FORWARD], ("activations",)),
    MemoryUse("held weight gradients", COLOURS[ActionKind.WEIGHT_GRAD], ("weight_grad_holds",)),
    MemoryUse("other", COLOURS[ActionKind.RECOMPUTE], ("statistics", "scratch", "messages", "working")),
)

Used = tuple[float, tuple[int, ...]]
"""(time_s, bytes of each of `USES` from then on)."""


def used(over_time: OverTime) -> list[Used]:
    """A rank's memory by `USES`: an entry for each moment at which it changes."""
    levels: list[Used] = []
    for time_s, parts in over_time:
        sizes = by_use(parts)
        if not levels or sizes != levels[-1][1]:
            levels.append((time_s, sizes))
    return levels


def by_use(parts: MemoryParts) -> tuple[int, ...]:
    """Bytes of each of `USES`."""
    return tuple(sum(getattr(parts, part) for part in use.parts) for use in USES)


def present(ranks: Sequence[Sequence[Used]]) -> list[int]:
    """The indices of those of `USES` that take memory on any rank at any time."""
    levels = [sizes for rank in ranks for _, sizes in rank]
    return [number for number in range(len(USES)) if any(sizes[number] for sizes in levels)]


def bytes_text(count: int) -> str:
    """`count` as text, with three significant digits: `512 B`, `1.24 MB`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * factor:
            return f"{count / factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{count} B"
