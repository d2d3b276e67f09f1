"""Slowdown of each link: its ranks' measurements over the profile's values. Holds state but no clock.

The time of the model's largest message stands for the rate, half a round trip for the latency. Both are compared with
the profile's after a constant is added to both: a change that no step notices is none. A link never counts as faster
than the profile has it: that measurement includes copies, which a link's own rate does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.adapt.detection import SlowdownWatch, after
from planner.observed import LinkTime, StepTimes
from planner.profile import Link, Profile
from planner.simulation.slow_links import SlowLink
from planner.wording import link_rate, seconds

NOTICED_S = 0.001
"""Lower bound of the extra message time that no step notices."""
NOTICED_SHARE = 0.05
"""The same as a share of a microbatch's passes on one rank."""
BOUND = 1.5
"""A link that is at least so fast that a message takes no longer than this, times the profile's, counts as fast."""
MATERIAL = 1.2
"""Factor by which a time must have changed since it was given out."""
STALE_STEPS = 500
"""A link that was slow and has not been measured for so long counts as in the profile again: else a plan that avoids
it would avoid it for ever."""
SLOWEST = 1e6
"""Largest believable ratio."""

Links = tuple[SlowLink, ...]
"""By rank: all links that are slower than the profile has them."""
_Ends = tuple[int, int]


@dataclass
class _Known:
    """State of one link, as ratios to the profile's values."""

    rate: SlowdownWatch = field(default_factory=lambda: SlowdownWatch(level=1.0))
    latency: SlowdownWatch = field(default_factory=lambda: SlowdownWatch(level=1.0))
    measured: int | None = None
    """The newest step with a measurement of it."""
    given: tuple[float, float] = (1.0, 1.0)
    """The levels that were given out last."""

    @property
    def levels(self) -> tuple[float, float]:
        return self.rate.level or 1.0, self.latency.level or 1.0


class LinkSlowdowns:
    """Tracks the slowdowns of one job's links.

    Args:
        profile: as measured before the job.
        known: what is known already, from the log.
    """

    def __init__(self, profile: Profile, known: Links = ()) -> None:
        self._cluster = profile.cluster
        layers = profile.model.layers
        self._largest = max(max(layer.boundary_bytes, layer.boundary_grad_bytes, 1) for layer in layers)
        passes_s = sum(layer.forward_s + layer.backward_s for layer in layers) / len(profile.cluster.devices)
        self._noticed_s = max(NOTICED_S, NOTICED_SHARE * passes_s)
        self._known: dict[_Ends, _Known] = {}
        for one in known:
            link = self._link((one.source, one.target))
            rate = self._rate_ratio(link, one.bytes_per_s)
            latency = self._latency_ratio(link, one.latency_s)
            self._known[one.source, one.target] = _Known(
                SlowdownWatch(level=rate), SlowdownWatch(level=latency), given=(rate, latency)
            )

    def observe(self, observed: StepTimes, members: Sequence[int]) -> tuple[list[str], list[str]]:
        """Learn from one rank's report; return the changes that it completes and what was ignored, in words.

        Args:
            members: rank by place.
        """
        changes: list[str] = []
        ignored: list[str] = []
        for one in observed.links:
            if why := _nonsense(one, observed.place, len(members)):
                ignored.append(f"a link of rank {observed.rank} in step {observed.step} is ignored: {why}")
                continue
            ends = observed.rank, members[one.target]
            changes += self._learn(ends, observed.step, one)
        return changes, ignored

    def links(self) -> Links:
        """All slow ones, as they are now."""
        found: list[SlowLink] = []
        for ends, known in sorted(self._known.items()):
            rate, latency = known.levels
            if max(rate, latency) > MATERIAL:
                found.append(self._slow(ends, rate, latency))
        return tuple(found)

    def changed(self, step: int) -> bool:
        """Whether a link has become another one since this was so last, at `step`."""
        found = False
        for known in self._known.values():
            # Of a link that is known from the log, no measurement counts as old before there is a step to count from.
            known.measured = known.measured or step
            if max(known.levels) > MATERIAL and step - known.measured > STALE_STEPS:
                known.rate, known.latency = SlowdownWatch(level=1.0), SlowdownWatch(level=1.0)
            pairs = zip(known.levels, known.given, strict=True)
            if any(abs(math.log(now / before)) > math.log(MATERIAL) for now, before in pairs):
                known.given = known.levels
                found = True
        return found

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget the links of all but `ranks`."""
        kept = frozenset(ranks)
        self._known = {ends: known for ends, known in self._known.items() if kept.issuperset(ends)}

    def _learn(self, ends: _Ends, step: int, one: LinkTime) -> list[str]:
        link = self._link(ends)
        known = self._known.setdefault(ends, _Known())
        known.measured = step
        found = []
        if one.size_bytes:
            ratio = self._rate_ratio(link, one.size_bytes / one.seconds)
            news = not one.at_least
            if one.at_least and ratio < known.levels[0]:
                ratio, news = 1.0 if ratio < BOUND else ratio, True
            if news:
                known.rate, change = after(known.rate, step, ratio)
                found.append(change)
        if one.round_trip_s is not None:
            known.latency, change = after(
                known.latency, step, self._latency_ratio(link, one.round_trip_s / 2)
            )
            found.append(change)
        since = [change.since for change in found if change is not None]
        return [self._said(ends, link, min(since))] if since else []

    def _said(self, ends: _Ends, link: Link, since: int) -> str:
        now = self._slow(ends, *self._known[ends].levels)
        return (
            f"the link from rank {ends[0]} to rank {ends[1]} carries {link_rate(now.bytes_per_s)} with a latency"
            f" of {seconds(now.latency_s)} since step {since}"
            f" (before the job: {link_rate(link.bytes_per_s)}, {seconds(link.latency_s)})"
        )

    def _slow(self, ends: _Ends, rate: float, latency: float) -> SlowLink:
        link, noticed_s = self._link(ends), self._noticed_s
        largest_s = rate * (self._largest / link.bytes_per_s + noticed_s) - noticed_s
        return SlowLink(
            source=ends[0],
            target=ends[1],
            latency_s=float(f"{max(link.latency_s, latency * (link.latency_s + noticed_s) - noticed_s):.4g}"),
            bytes_per_s=float(f"{min(link.bytes_per_s, self._largest / max(largest_s, 1e-12)):.4g}"),
        )

    def _rate_ratio(self, link: Link, bytes_per_s: float) -> float:
        took_s, expected_s = self._largest / bytes_per_s, self._largest / link.bytes_per_s
        return min(SLOWEST, max(1.0, (took_s + self._noticed_s) / (expected_s + self._noticed_s)))

    def _latency_ratio(self, link: Link, latency_s: float) -> float:
        return min(SLOWEST, max(1.0, (latency_s + self._noticed_s) / (link.latency_s + self._noticed_s)))

    def _link(self, ends: _Ends) -> Link:
        """In the profile; for ranks that it does not have, the median one."""
        if max(ends) < len(self._cluster.devices):
            return self._cluster.link(*ends)
        links = [link for row in self._cluster.links for link in row if link is not None]
        ordered = sorted(links, key=lambda link: link.transfer_s(self._largest))
        return ordered[len(ordered) // 2] if ordered else Link(latency_s=0.0, bytes_per_s=1e12)


def _nonsense(one: LinkTime, place: int, places: int) -> str:
    """Why a measurement cannot be; "" if it can."""
    if not 0 <= one.target < places or one.target == place:
        return f"place {place} has no link to place {one.target}, of {places}"
    if one.size_bytes < 0 or (one.size_bytes and not (math.isfinite(one.seconds) and one.seconds > 0)):
        return f"{one.size_bytes} bytes passed in {one.seconds} s"
    trip_s = one.round_trip_s
    if trip_s is not None and not (math.isfinite(trip_s) and trip_s >= 0):
        return f"a round trip took {trip_s} s"
    return ""
