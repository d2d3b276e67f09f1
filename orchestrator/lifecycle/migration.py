"""Layers that change ranks while a job trains: the plan that a move asks for, and the path to it. Pure.

A plan says which layers each rank owns and of which it holds standby copies. To move layers to a rank, one
plan gives it copies of them, and the next one makes it their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from planner.ir import Schedule
from planner.plan import Plan, PlanError
from planner.wording import counted

Mode = Literal["live", "deferred", "stop"]


@dataclass(frozen=True, kw_only=True)
class Move:
    """A request that the training ranks follow another plan."""

    plan: Plan
    """The final plan; it gets its epoch and version when it is issued."""
    schedule: Schedule
    mode: Mode
    asked_s: float
    """Seconds since the Unix epoch."""
    base: Plan | None = None
    """The plan that it was made for: the move is refused if another one is in force when its turn comes."""
    id: str = ""
    """Of the command that requested it, which gets its outcome; empty: none did."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A move under way."""

    move: Move
    path: tuple[Plan, ...]
    """Plans still to come; the ranks prepare the first one."""
    began: int
    """Steps committed when the move was requested."""
    now: Plan
    """The plan at that step."""
    committed_s: float = 0.0
    """Time of the newest reported commit."""
    reached: frozenset[int] = frozenset()
    """Places of the ranks that follow the first plan of `path`."""
    bytes: int = 0
    """Transferred so far."""
    stall_s: float = 0.0
    """The longest stall of any rank in the switches so far."""
    told: bool = False
    """The layers have moved; only copies are left to move."""


def moved_layers(now: Plan, then: Plan) -> tuple[int, ...]:
    """The layers whose pipeline rank changes."""
    return tuple(layer for layer in range(now.layers[-1][1]) if _rank_of(now, layer) != _rank_of(then, layer))


def arrivals(now: Plan, then: Plan) -> tuple[tuple[int, int], ...]:
    """(layer, place): the places to which layers move that have no copy of them under `now`."""
    return tuple(
        (layer, place)
        for layer in moved_layers(now, then)
        for place in _places(then, layer)
        if place not in _standbys(now, layer)
    )


def with_layers(now: Plan, first: int, stop: int, rank: int, *, frozen_stages: int = 0) -> Plan:
    """`now` with the layers `first` to `stop` - 1 in the stage of pipeline rank `rank` that is next to them.

    Args:
        frozen_stages: how many of the first stages run forward only.

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
    if all(_rank_of(now, layer) == rank for layer in range(first, stop)):
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
        if min(stage, giver) < frozen_stages:
            raise PlanError(
                f"the schedule's first {counted(frozen_stages, 'stage')} only go forward: no layer can enter or"
                " leave them"
            )
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


def path(now: Plan, then: Plan) -> tuple[Plan, ...]:
    """Return the plans that lead from `now` to `then`, `then` included, without plans that change nothing.

    First each rank gets copies of the layers that it will own. Then ownership changes, and ranks that had a
    layer or a copy of it keep it until the copies that `then` plans are up to date.
    """
    layers = range(now.layers[-1][1])
    heirs = [
        () if _rank_of(now, layer) == _rank_of(then, layer) else _places(then, layer) for layer in layers
    ]
    kept = [set(_standbys(now, layer)) | set(heirs[layer]) for layer in layers]
    copying = replace(now, standbys=_table(kept))
    until: list[set[int]] = []
    for layer in layers:
        planned = set(_standbys(then, layer))
        if planned:
            planned |= {*_standbys(now, layer), *_places(now, layer)} - {*_places(then, layer)}
        until.append(planned)
    taking = replace(then, standbys=_table(until))
    plans: list[Plan] = []
    before = now
    for plan in (
        copying,
        taking,
        replace(then, standbys=_table([_standbys(then, layer) for layer in layers])),
    ):
        if not same(before, plan):
            plans.append(plan)
            before = plan
    return tuple(plans)


def same(one: Plan, other: Plan) -> bool:
    """Whether all ranks do the same under both."""
    fields = ("layers", "stage_ranks", "pipeline_count", "schedule", "chunks", "recompute")
    return all(getattr(one, field) == getattr(other, field) for field in fields) and all(
        set(mine) == set(theirs) for mine, theirs in zip_longest(one.standbys, other.standbys, fillvalue=())
    )


def _table(places: Sequence[Sequence[int] | set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(of_one)) for of_one in places) if any(places) else ()


def _standbys(plan: Plan, layer: int) -> tuple[int, ...]:
    return plan.standbys[layer] if plan.standbys else ()


def _rank_of(plan: Plan, layer: int) -> int:
    return plan.stage_ranks[plan.stage_of_layer(layer)]


def _places(plan: Plan, layer: int) -> tuple[int, ...]:
    """The owners, one in each pipeline."""
    return plan.siblings(_rank_of(plan, layer))


def _span(first: int, stop: int) -> str:
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"
