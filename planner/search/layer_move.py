"""A run of layers that goes to a neighbouring stage: as people write it, and the plan with it. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.plan import Plan, PlanError


def parse_layers(text: str) -> tuple[int, int]:
    """Parse `3` or `3-4` to [first, stop).

    Raises:
        PlanError: it is neither; says what to write.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise PlanError(f"{text!r} is neither a layer nor a range of layers: write 3, or 3-4")
    first = int(found[1])
    stop = int(found[2] or found[1]) + 1
    if stop <= first:
        raise PlanError(f"the range of layers {text!r} runs backwards: write {found[2]}-{found[1]}")
    return first, stop


def with_layers(now: Plan, first: int, stop: int, rank: int) -> Plan:
    """`now` with the layers `first` to `stop` - 1 in the stage of pipeline rank `rank` that is next to them.

    Raises:
        PlanError: there is no such layer or rank, or a stage would be empty or no run of layers; says what
            can move.
    """
    layers, ranks = now.layers[-1][1], now.pipeline_ranks
    asked = _span(first, stop)
    if not 0 <= first < stop <= layers:
        raise PlanError(f"there is no {asked}: the model has layers 0 to {layers - 1}")
    if not 0 <= rank < ranks:
        raise PlanError(f"there is no place {rank} in the pipeline: it has places 0 to {ranks - 1}")
    if all(now.rank_of_layer(layer) == rank for layer in range(first, stop)):
        raise PlanError(f"{asked} {'is' if stop - first == 1 else 'are'} at that rank already")
    for stage, (begin, end) in enumerate(now.layers):
        if now.stage_ranks[stage] != rank or not (stop == begin or first == end):
            continue
        giver = stage - 1 if stop == begin else stage + 1
        start, rest = now.layers[giver]
        taken = [list(span) for span in now.layers]
        if stop == begin and first > start:
            taken[stage][0] = taken[giver][1] = first
        elif first == end and stop < rest:
            taken[stage][1] = taken[giver][0] = stop
        else:
            continue
        return replace(now, layers=tuple((begin, end) for begin, end in taken))
    raise PlanError(
        f"{asked} cannot go there: a stage is a run of layers, and none may be left empty. {_choices(now, rank)}"
    )


def _choices(now: Plan, rank: int) -> str:
    """Describe which layers `rank` can take."""
    told = []
    for stage, (first, stop) in enumerate(now.layers):
        if now.stage_ranks[stage] != rank:
            continue
        if stage and (lowest := now.layers[stage - 1][0] + 1) < first:
            told.append(_span(lowest, first) + (" or the last of them" if lowest + 1 < first else ""))
        if stage + 1 < now.stages and stop < (highest := now.layers[stage + 1][1] - 1):
            told.append(_span(stop, highest) + (" or the first of them" if stop + 1 < highest else ""))
    spans = zip(now.layers, now.stage_ranks, strict=True)
    held = ", ".join(_span(*span) for span, owner in spans if owner == rank)
    if not told:
        return f"The rank holds {held}, and its neighbours have no layer to spare"
    return f"The rank holds {held} and can take {', '.join(told)}"


def _span(first: int, stop: int) -> str:
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"
