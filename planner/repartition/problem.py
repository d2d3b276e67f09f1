"""Input of a search over cuts and device orders: one running pipeline, its model and its devices as arrays.

A candidate is a cut and an order: which pipeline rank takes the part of which rank of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.freezing import Ratios
from planner.ir import Schedule
from planner.partition.stage_costs import StageCosts
from planner.plan import Plan
from planner.profile import Cluster, Profile
from planner.repartition.slowdowns import SlowdownModel, SlowdownTable
from planner.schedule.expand import frozen_stages, recomputing_stages, schedule_of, with_recompute
from planner.schedule.in_flight import Counts, largest_counts
from planner.schedule.passes import repeat

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Order = tuple[int, ...]
"""Per rank of the schedule, the pipeline rank that takes its part."""


@dataclass(frozen=True)
class Candidates:
    """N candidates."""

    cuts: Integers
    """int[N, S + 1]: the first layer of each stage, and the number of layers."""
    orders: Integers
    """int[N, R]."""

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def distinct_orders(self) -> Integers:
        """int[1, R] if all have the same order, else `orders`."""
        orders = self.orders
        return orders[:1] if len(orders) and (orders == orders[0]).all() else orders

    def select(self, rows: Integers | NDArray[np.bool_]) -> Candidates:
        return Candidates(self.cuts[rows], self.orders[rows])

    @staticmethod
    def one_order(cuts: Integers, order: Sequence[int]) -> Candidates:
        return Candidates(cuts, np.tile(np.array(order), (len(cuts), 1)))

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        return Candidates(
            np.concatenate([part.cuts for part in parts]), np.concatenate([part.orders for part in parts])
        )


class RepartitionProblem:
    """The search for another plan of the same ranks.

    Args:
        profile: with a device per place and the links between them; its slowdowns do not count.
        now: the plan that the ranks follow.
        schedule: of `now`, without recomputes, and with the backward passes of all stages: candidates have other ones.
        slowdowns: of the places.
        ratios: frozen shares of weight gradients, by layer and microbatch; None: nothing is frozen.
    """

    def __init__(
        self,
        profile: Profile,
        now: Plan,
        schedule: Schedule,
        slowdowns: SlowdownModel,
        ratios: Ratios | None = None,
    ) -> None:
        self.profile, self.now, self.schedule, self.ratios = profile, now, schedule, ratios
        self.stage_ranks = tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages))
        self.stages_of_rank = tuple(schedule.stages_of_rank(rank) for rank in range(schedule.ranks))
        self.slowdowns = SlowdownTable(slowdowns, self.stages_of_rank, now.pipeline_count)
        self._schedules: dict[tuple[tuple[int, ...], int, frozenset[int]], Schedule] = {}
        """By ranks of the stages, number of frozen stages, and stages that recompute."""

    @property
    def layers(self) -> int:
        return len(self.profile.model.layers)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def ranks(self) -> int:
        return self.schedule.ranks

    @property
    def order_now(self) -> Order:
        """The present order: the schedule has its programs where `now` has them."""
        return tuple(range(self.ranks))

    @cached_property
    def cut_now(self) -> Integers:
        """int[S + 1], of `now`."""
        return np.array([0, *(stop for _, stop in self.now.layers)])

    @cached_property
    def window(self) -> Schedule:
        """The schedule of a step's windows, with an R on every stage if any layer recomputes: where none does, it takes
        no time."""
        again = range(self.schedule.frozen_stages, self.stages) if self.now.recompute else ()
        window = with_recompute(self.schedule, again)
        return window if self.now.windows == 1 else repeat(window, self.now.windows)

    @cached_property
    def splits(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return self.schedule.splits_backward

    def plan(self, cut: Integers, order: Sequence[int], partition: str) -> Plan:
        """`now` with another cut and order, and with even shares. Its standbys are those of `now`."""
        bounds = cut.tolist()
        return replace(
            self.now,
            layers=tuple(pairwise(bounds)),
            stage_ranks=tuple(int(order[rank]) for rank in self.stage_ranks),
            shares=(),
            partition=partition,
        )

    def schedule_of(self, plan: Plan) -> Schedule:
        """The schedule of a plan of this problem, with its recomputes and without what its frozen stages leave out."""
        frozen = frozen_stages(plan.schedule, plan.layers, plan.frozen)
        of = plan.stage_ranks, frozen, recomputing_stages(plan.layers, plan.recompute)
        if of not in self._schedules:
            self._schedules[of] = schedule_of(plan, self.schedule)
        return self._schedules[of]

    def moved_bytes(self, cuts: Integers, order: Order) -> Integers:
        """int[N]: state of the layers that change ranks, in one pipeline."""
        sizes = np.array([layer.moved_bytes for layer in self.profile.model.layers])
        layers = np.arange(self.layers)
        now = np.array(self.now.stage_ranks)[np.searchsorted(self.cut_now, layers, side="right") - 1]
        owners = np.array(order)[list(self.stage_ranks)]
        return np.array(
            [int(sizes[owners[np.searchsorted(cut, layers, side="right") - 1] != now].sum()) for cut in cuts],
            dtype=np.int64,
        )

    def slowdowns_of(self, cut: Integers, order: Sequence[int]) -> tuple[float, ...]:
        """By place, for one candidate."""
        found = self.slowdowns.of(cut[None, :], np.array([order]))[0]
        by_place = np.empty(self.now.world_size)
        for pipeline, row in enumerate(found):
            by_place[pipeline * self.ranks + np.array(order)] = row
        return tuple(by_place.tolist())

    def costs(
        self,
        cut: Integers,
        order: Sequence[int],
        blocks: tuple[tuple[int, int], ...] | None = None,
        reserved_bytes: dict[int, int] | None = None,
    ) -> StageCosts:
        """Input of the partition programs: the devices in `order`, each as slow as the slowest of its siblings in the
        other pipelines, with the slowdowns of `cut`.

        Args:
            reserved_bytes: by pipeline rank, memory that stages may not use; None: memory is not asked for.
        """
        slow = self.slowdowns.of(cut[None, :], np.array([order]))[0].max(axis=0)
        cluster = self.profile.cluster
        devices = [
            replace(cluster.devices[place], slowdown=float(factor))
            for place, factor in zip(order, slow, strict=True)
        ]
        links = tuple(tuple(cluster.links[a][b] for b in order) for a in order)
        placed: Cluster = replace(cluster, devices=tuple(devices), links=links)
        return StageCosts(
            replace(self.profile, cluster=placed),
            self.stage_ranks,
            # Only memory depends on them.
            () if reserved_bytes is None else self.in_flight,
            frozenset(self.now.recompute),
            {part: (reserved_bytes or {}).get(place, 0) for part, place in enumerate(order)},
            blocks,
            self.now.shards,
            self.now.shards if self.now.shard == "gradients" else 1,
        )

    @cached_property
    def in_flight(self) -> tuple[tuple[Counts, ...], ...]:
        """Per stage, the largest counts of microbatches that it holds."""
        return tuple(largest_counts(self.schedule, stage) for stage in range(self.stages))
