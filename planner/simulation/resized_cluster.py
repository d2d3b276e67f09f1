"""A cluster like the one that was measured, of as many ranks as are left or have come.

Who is left is not known here: only how many there are, and which of them share a failure domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from planner.profile import Cluster, Link

_TYPICAL_BYTES = 1_000_000
"""The message by whose time links are put in order."""


def domain_pattern(domains: Sequence[str]) -> tuple[int, ...]:
    """The domains numbered in order of appearance: what a plan depends on of them."""
    number: dict[str, int] = {}
    return tuple(number.setdefault(domain, len(number)) for domain in domains)


def resized(measured: Cluster, pattern: Sequence[int]) -> Cluster:
    """As many ranks as `pattern` has, linked as ranks of one machine and of two typically were: speed is the median
    device's, memory the least."""
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
        devices=(device,) * len(pattern),
        links=tuple(
            tuple(None if a == b else near if pattern[a] == pattern[b] else far for b in range(len(pattern)))
            for a in range(len(pattern))
        ),
    )


def links_are_uniform(measured: Cluster) -> bool:
    """Whether it makes no difference to `like` who shares a domain: one kind of link was measured, or none."""
    return None in (_typical(measured, same=True), _typical(measured, same=False))


def _typical(measured: Cluster, *, same: bool) -> Link | None:
    """The median link between ranks of the same machine or of different ones; None: none was measured."""
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
