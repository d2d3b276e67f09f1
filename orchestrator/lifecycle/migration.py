"""Layers that change ranks while a job trains: a requested move, and the plans that lead to it. Pure.

A plan says which layers each rank owns and of which it holds standby copies. To move layers to a rank, one
plan gives it copies of them, and the next one makes it their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from planner.ir import Schedule
from planner.plan import Plan

Mode = Literal["live", "deferred", "stop"]


@dataclass(frozen=True, kw_only=True)
class RequestedMove:
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
    """Id of the command that requested it, which gets its outcome; empty: none did."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A move under way."""

    move: RequestedMove
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
    return tuple(
        layer for layer in range(now.layers[-1][1]) if now.rank_of_layer(layer) != then.rank_of_layer(layer)
    )


def path(now: Plan, then: Plan) -> tuple[Plan, ...]:
    """Return the plans that lead from `now` to `then`, `then` included, without plans that change nothing.

    First each rank gets copies of the layers that it will own. Then ownership changes, and ranks that had a
    layer or a copy of it keep it until the copies that `then` plans are up to date. Where states are shared out, the
    same holds of each shard: with its layer it changes ranks within its pipeline.
    """
    kept: list[set[int]] = []
    until: list[set[int]] = []
    for piece in now.pieces:
        before_it, after = {*now.holders_of(piece)}, {*then.holders_of(piece)}
        kept.append({*now.copies_of_piece(piece)} | (after - before_it))
        planned = {*then.copies_of_piece(piece)}
        if planned:
            planned |= ({*now.copies_of_piece(piece)} | before_it) - after
        until.append(planned)
    copying = replace(now, standbys=_table(kept))
    taking = replace(then, standbys=_table(until))
    plans: list[Plan] = []
    before = now
    last = replace(then, standbys=_table([{*then.copies_of_piece(piece)} for piece in then.pieces]))
    for plan in (copying, taking, last):
        if not same(before, plan):
            plans.append(plan)
            before = plan
    return tuple(plans)


def same(one: Plan, other: Plan) -> bool:
    """Whether all ranks do the same under both."""
    fields = (
        *("layers", "stage_ranks", "pipeline_count", "shares", "shard", "schedule", "chunks", "recompute"),
        *("snapshots", "snapshot_every"),
    )
    return all(getattr(one, field) == getattr(other, field) for field in fields) and all(
        set(mine) == set(theirs) for mine, theirs in zip_longest(one.standbys, other.standbys, fillvalue=())
    )


def _table(places: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(of_one)) for of_one in places) if any(places) else ()
