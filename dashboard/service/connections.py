"""Admission of connections to the service: how many there may be, and which goes when another one comes.

A connection is a stranger's while it serves no request and has served none with a valid token. An attacker can hold
many of those; everyone else leaves that state within milliseconds. So they are the ones that are few, and the one that
has waited longest makes room for the next. Pure: knows no sockets and no clock.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the number of open connections."""

    most: int = 2_000
    most_each: int = 1_000
    """Most connections of one address: behind a proxy or a tunnel all clients share one."""
    strangers: int = 500
    strangers_each: int = 100


@dataclass(frozen=True)
class Admission:
    """The decision on a new connection."""

    refused: str = ""
    """Why it is not kept; empty: it is."""
    closes: int | None = None
    """The connection that is closed for it."""


class OpenConnections:
    """The connections that are open, by number."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._addresses: dict[int, str] = {}
        self._each: Counter[str] = Counter()
        self._strangers: OrderedDict[int, None] = OrderedDict()
        """The one that has waited longest first."""
        self._strangers_each: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, number: int, address: str) -> Admission:
        """Decide on the new connection `number` of `address`. It is a stranger's."""
        limits, own = self._limits, self._strangers_each.get(address, OrderedDict())
        closes, why = None, ""
        if len(own) >= limits.strangers_each:
            closes = next(iter(own))
        elif self._each[address] >= limits.most_each:
            closes, why = next(iter(own), None), f"{limits.most_each} connections of {address} are open"
        elif len(self._strangers) >= limits.strangers or len(self) >= limits.most:
            closes, why = next(iter(self._strangers), None), f"{limits.most} connections are open"
        if closes is None and why:
            return Admission(refused=why)
        if closes is not None:
            self.leave(closes)
        self._addresses[number] = address
        self._each[address] += 1
        self.wait(number, known=False)
        return Admission(closes=closes)

    def wait(self, number: int, *, known: bool) -> None:
        """The connection serves no request.

        Args:
            known: whether the last one that it served had a valid token.
        """
        address = self._addresses.get(number)
        if address is not None and not known:
            self._strangers[number] = None
            self._strangers_each.setdefault(address, OrderedDict())[number] = None

    def serve(self, number: int) -> None:
        """The connection serves a request."""
        address = self._addresses.get(number)
        if address is not None and number in self._strangers:
            del self._strangers[number]
            del self._strangers_each[address][number]
            if not self._strangers_each[address]:
                del self._strangers_each[address]

    def leave(self, number: int) -> None:
        """The connection is closed, or is about to be."""
        self.serve(number)
        address = self._addresses.pop(number, None)
        if address is not None:
            self._each[address] -= 1
            if not self._each[address]:
                del self._each[address]


def network_of(host: str) -> str:
    """The network address that counts as one sender: of IPv6 the first 64 bits, which one subscriber has all of."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
