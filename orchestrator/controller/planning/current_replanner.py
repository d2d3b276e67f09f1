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

    def set(
        self,
        *,
        method: str | None = None,
        known: RankSlowdowns | None = None,
        factors: Factors = (),
        links: Links | None = None,
        limits: Mapping[int, int] | None = None,
        recompute: tuple[int, ...] | None = None,
        frozen: tuple[int, int, int] | None = None,
        pipelines: int | None = None,
        replicas: int | None = None,
    ) -> None:
        """Plan for the copies of another freeze method, other speeds, times, links, limits or frozen layers, from now
        on.

        Args:
            method: a `freeze.method`, whose copies of the weights every plan must have room for. None: as before.
            known: the speeds of the ranks. None: as before.
            factors: on the layers' times. Empty: as before.
            links: by rank, those that are slower than the profile's. None: as before.
            limits: by rank, the most memory that a plan may take there. None: as before.
            recompute: the layers that recompute in every plan. None: as before.
            frozen: (layers frozen as a whole, from the input up; how many of them are never trained again; of how many
                the outputs are kept). None: as before.
            pipelines: that plans have; 0: as many as make the shortest step. None: as before.
            replicas: of a step. None: as before.
        """
        self._factors = factors or self._factors
        before = self._replanner
        limits = self._limits if limits is None else dict(limits)
        links = self._links if links is None else links
        special = (limits, links) != (self._limits, self._links)
        self._limits, self._links = limits, links
        if recompute is not None and recompute != before.first.recompute:
            first = replace(before.first, recompute=recompute)
            self._replanner = replace(before, first=first, schedule=schedule_after(before.schedule, first))
        if replicas is not None:
            self._replanner = self._replanner.with_replicas(replicas)
        known = self._known if known is None else known
        other, self._known = known != self._known, known
        self._method = self._method if method is None else method
        planned = None if self._profile is None else with_factors(self._profile, self._factors)
        if planned is not None and self._method is not None:
            planned = planned.frozen_by(self._method)
        layers, released, kept = frozen or (before.frozen, before.released, before.kept)
        count = before.pipelines if pipelines is None else pipelines or None
        then = replace(
            self._replanner, profile=planned, frozen=layers, released=released, kept=kept, pipelines=count
        )
        if then != self._replanner:
            # A new one, which remembers no answers: those of the old one are for what it counted.
            self._replanner = then
        if self._replanner is not before:
            self._special = {}
        elif not other and not special:
            return
        self._changed()
