"""The replanner that a controller plans with now, and the speeds of its ranks and links: they change while it trains.

Knows no events and makes no plans; whoever learns something new about the job sets it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from planner.adapt.layer_times import Factors, with_factors
from planner.adapt.link_times import Links
from planner.adapt.speeds import RankSlowdowns
from planner.schedule.expand import schedule_after
from planner.search.replan import Replanner
from planner.simulation.resized_cluster import links_differ


class CurrentReplanner:
    """The one place in a controller that holds its job's replanner. Use it on the event loop; a thread that plans gets
    the `replanner` of the moment, which itself never changes.

    Args:
        first: as the job began: its profile has the job's memory limits and the copies of the spec's freeze method.
        changed: called after each change: plans that were made ahead are out of date.
    """

    def __init__(self, first: Replanner, changed: Callable[[], None] = lambda: None) -> None:
        self._replanner = first
        self._profile = first.profile
        self._method: str | None = None
        self._known = RankSlowdowns()
        self._factors: Factors = ()
        self._limits: Mapping[int, int] = {}
        self._links: Links = ()
        self._special: dict[tuple[tuple[int | None, ...], Links, tuple[int | None, ...]], Replanner] = {}
        """Replanners with the limits, the slow links and the measured ones of some ranks, by place: each remembers its
        answers."""
        cluster = None if first.profile is None else first.profile.cluster
        self._devices = 0 if cluster is None or not links_differ(cluster) else len(cluster.devices)
        """Ranks whose links the profile has, and that are not all alike."""
        self._changed = changed

    @property
    def replanner(self) -> Replanner:
        """The replanner as of now. Read it for each plan, and keep it for none: another one may take its place."""
        return self._replanner

    def of(self, ranks: Sequence[int]) -> Replanner:
        """The replanner as of now for `ranks`, by place: with the limits of their memory, their slow links,
        and where the profile's are unlike those that it has of them."""
        limits = tuple(self._limits.get(rank) for rank in ranks)
        if all(limit is None for limit in limits):
            limits = ()
        place_of = {rank: place for place, rank in enumerate(ranks)}
        links = tuple(
            replace(link, source=place_of[link.source], target=place_of[link.target])
            for link in self._links
            if link.source in place_of and link.target in place_of
        )
        linked = tuple(rank if rank < self._devices else None for rank in ranks)
        if all(device is None for device in linked):
            linked = ()
        if not limits and not links and not linked:
            return self._replanner
        key = limits, links, linked
        if key not in self._special:
            self._special[key] = replace(self._replanner, limits=limits, links=links, linked=linked)
        return self._special[key]

    @property
    def limits(self) -> Mapping[int, int]:
        """Rank -> the most memory that a plan may take there, of the ranks whose device cannot be used up."""
        return self._limits

    @property
    def known(self) -> RankSlowdowns:
        """The speeds of the ranks that have been measured."""
        return self._known

    def set_speeds(
        self, *, known: RankSlowdowns | None = None, factors: Factors = (), links: Links | None = None
    ) -> None:
        """Plan for other speeds of ranks, times of layers or links from now on; what is not given stays as before.

        Args:
            known: the speeds of the ranks.
            factors: on the layers' times.
            links: by rank, those that are slower than the profile's.
        """
        before = self._known, self._links
        self._known = self._known if known is None else known
        self._links = self._links if links is None else links
        self._factors = factors or self._factors
        self._plan_with(self._replanner, other=(self._known, self._links) != before)

    def set_memory(
        self, *, limits: Mapping[int, int] | None = None, recompute: tuple[int, ...] | None = None
    ) -> None:
        """Plan for other memory limits, or with other layers that recompute, from now on; None: as before.

        Args:
            limits: by rank, the most memory that a plan may take there.
            recompute: the layers that recompute in every plan.
        """
        replanner, before = self._replanner, self._limits
        self._limits = self._limits if limits is None else dict(limits)
        if recompute is not None and recompute != replanner.first.recompute:
            first = replace(replanner.first, recompute=recompute)
            replanner = replace(replanner, first=first, schedule=schedule_after(replanner.schedule, first))
        self._plan_with(replanner, other=self._limits != before)

    def set_freezing(self, *, method: str | None = None, frozen: tuple[int, int, int] | None = None) -> None:
        """Plan for another freeze method or other frozen layers from now on; None: as before.

        Args:
            method: a `freeze.method`, whose copies of the weights every plan must have room for.
            frozen: (layers frozen as a whole, from the input up; how many of them are never trained again; of how many
                the outputs are kept).
        """
        replanner = self._replanner
        self._method = self._method if method is None else method
        if frozen is not None:
            layers, released, kept = frozen
            replanner = replace(replanner, frozen=layers, released=released, kept=kept)
        self._plan_with(replanner)

    def set_pipelines(self, *, pipelines: int | None = None, replicas: int | None = None) -> None:
        """Plan for another number of pipelines or of replicas of a step from now on; None: as before.

        Args:
            pipelines: 0: as many as make the shortest step.
        """
        replanner = self._replanner
        if replicas is not None:
            replanner = replanner.with_replicas(replicas)
        if pipelines is not None:
            replanner = replace(replanner, pipelines=pipelines or None)
        self._plan_with(replanner)

    def _plan_with(self, replanner: Replanner, *, other: bool = False) -> None:
        """Hold `replanner`, with the profile as the factors and the freeze method make it.

        Args:
            other: whether plans change even if that is the replanner that is held already.
        """
        planned = None if self._profile is None else with_factors(self._profile, self._factors)
        if planned is not None and self._method is not None:
            planned = planned.frozen_by(self._method)
        then = replace(replanner, profile=planned)
        if then != self._replanner:
            # A new one, which remembers no answers: those of the old one are for what it counted.
            self._replanner, self._special = then, {}
        elif not other:
            return
        self._changed()
