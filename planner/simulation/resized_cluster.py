"""The measured cluster with another number of ranks, after failures or joins.

This module does not know which ranks remain, only how many, which of them share a failure domain, and how slow
each is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

from planner.failure_domains import domain_name, zone_of
from planner.profile import Cluster, Link

_TYPICAL_BYTES = 1_000_000
"""Size of the message whose transfer time orders the links."""
UNLIKE = 1.2
"""Factor between the times of a message on two links from which they are not alike."""
_UNNOTICED_S = 2e-4
"""Extra message time that no plan notices."""
SPEED_STEP = 1.02
"""Factor between two slowdowns that plans tell apart."""


class Sites(NamedTuple):
    """Where the ranks of a plan are, in the order of places: a plan depends on nothing else of them."""

    domains: tuple[int, ...]
    """The failure domain of each, numbered in order of appearance."""
    slowdowns: tuple[float | None, ...] | None = None
    """Slowdown of each, in steps of `SPEED_STEP`. None: as the median of the profile's devices."""
    zones: tuple[int, ...] | None = None
    """The zone of each, numbered from 1 in order of appearance; 0: it is unknown. None: all are."""

    @staticmethod
    def of(domains: Sequence[str], slowdowns: Sequence[float | None] | None = None) -> Sites:
        """The sites of ranks in `domains`, of which those with a slowdown have been measured.

        Raises:
            ValueError: not one slowdown per domain.
        """
        number: dict[str, int] = {}
        pattern = tuple(number.setdefault(domain, len(number)) for domain in domains)
        zones = _zones(domains)
        if slowdowns is None or all(slowdown is None for slowdown in slowdowns):
            return Sites(pattern, None, zones)
        if len(slowdowns) != len(domains):
            raise ValueError(f"{len(domains)} domains, and {len(slowdowns)} slowdowns are given")
        return Sites(
            pattern,
            tuple(None if slowdown is None else _stepped(slowdown) for slowdown in slowdowns),
            zones,
        )

    @property
    def alike(self) -> bool:
        """Whether all ranks are equally fast, as far as is known."""
        return self.slowdowns is None or len({*self.slowdowns}) == 1

    def first(self, places: int) -> Sites:
        """Sites of the first `places` ranks."""
        return Sites(
            self.domains[:places],
            None if self.slowdowns is None else self.slowdowns[:places],
            None if self.zones is None else self.zones[:places],
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each rank's failure domain."""
        zones = self.zones or (0,) * len(self.domains)
        return tuple(
            domain_name(str(domain), str(zone or ""))
            for domain, zone in zip(self.domains, zones, strict=True)
        )


def _zones(domains: Sequence[str]) -> tuple[int, ...] | None:
    """Values of `Sites.zones` for `domains`."""
    number = {"": 0}
    zones = tuple(number.setdefault(zone_of(domain), len(number)) for domain in domains)
    return zones if any(zones) else None


def _stepped(slowdown: float) -> float:
    """`slowdown` to the nearest step."""
    return SPEED_STEP ** round(math.log(slowdown, SPEED_STEP))


def resized(
    measured: Cluster, pattern: Sequence[int], slowdowns: Sequence[float | None] | None = None
) -> Cluster:
    """A cluster of as many ranks as `pattern` has, with the typical link within a machine and between two machines.

    Every device has the smallest memory of the measured ones, and the median speed where `slowdowns` has none for it.
    """
    devices = measured.devices
    device = replace(
        devices[0],
        slowdown=median_low(device.slowdown for device in devices),
        memory_bytes=min(device.memory_bytes for device in devices),
    )
    near, far = _typical(measured, same=True), _typical(measured, same=False)
    near, far = near or far, far or near
    return replace(
        measured,
        devices=tuple(
            device if slowdown is None else replace(device, slowdown=slowdown)
            for slowdown in (slowdowns or (None,) * len(pattern))
        ),
        links=tuple(
            tuple(None if a == b else near if pattern[a] == pattern[b] else far for b in range(len(pattern)))
            for a in range(len(pattern))
        ),
    )


def with_links_of(cluster: Cluster, measured: Cluster, devices: Sequence[int | None]) -> Cluster:
    """`cluster` with the links that were measured between devices of `measured`.

    Args:
        devices: by place, which device of `measured` it is; None, or no entry: unknown, and its links stay.
    """
    known = [
        (place, device) for place, device in enumerate(devices[: len(cluster.devices)]) if device is not None
    ]
    if len(known) < 2:
        return cluster
    links = [list(row) for row in cluster.links]
    for source, a in known:
        for target, b in known:
            if source != target:
                links[source][target] = measured.links[a][b] or links[source][target]
    return replace(cluster, links=tuple(map(tuple, links)))


def links_differ(measured: Cluster) -> bool:
    """Whether some link is another one than the typical one within a machine, or between two, stands for."""
    devices = measured.devices
    typical = {same: _typical(measured, same=same) for same in (True, False)}
    for a, row in enumerate(measured.links):
        for b, link in enumerate(row):
            usual = typical[devices[a].machine == devices[b].machine]
            if link is None or usual is None:
                continue
            for size in (0, _TYPICAL_BYTES):
                ratio = _sent_s(link, size) / _sent_s(usual, size)
                if not 1 / UNLIKE <= ratio <= UNLIKE:
                    return True
    return False


def _sent_s(link: Link, size: int) -> float:
    """Total time of a message; never zero."""
    return _UNNOTICED_S + link.sender_busy_s(size) + link.transfer_s(size) + link.receiver_busy_s(size)


def limited(cluster: Cluster, limits: Sequence[int | None]) -> Cluster:
    """`cluster` whose first devices may use no more than `limits` bytes; None: all that they have."""
    devices = list(cluster.devices)
    for place, (device, limit) in enumerate(zip(cluster.devices, limits, strict=False)):
        if limit is not None:
            devices[place] = replace(device, memory_bytes=min(device.memory_bytes, max(1, limit)))
    return replace(cluster, devices=tuple(devices))


def links_are_uniform(measured: Cluster) -> bool:
    """Whether domains make no difference to `resized`: the profile has at most one kind of link."""
    return None in (_typical(measured, same=True), _typical(measured, same=False))


def _typical(measured: Cluster, *, same: bool) -> Link | None:
    """The median link within one machine or, without `same`, between two; None if none was measured."""
    devices = measured.devices
    links = [
        link
        for a, row in enumerate(measured.links)
        for b, link in enumerate(row)
        if link is not None and (devices[a].machine == devices[b].machine) == same
    ]
    ordered = sorted(
        links, key=lambda link: (link.transfer_s(_TYPICAL_BYTES), link.sender_s, link.receiver_s)
    )
    return ordered[len(ordered) // 2] if ordered else None
