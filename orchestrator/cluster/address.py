"""Parses addresses of Ray clusters. Knows neither Ray nor the network."""

from __future__ import annotations

import re

from workers.protocol.errors import JobError

_HOST_PORT = re.compile(r"(?:ray://)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})", re.ASCII)


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return where `address` points; None for `local` and `auto`, which name no host.

    Raises:
        JobError: it is no address.
    """
    if address in ("local", "auto"):
        return None
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise JobError(
            f"cluster.address = {address!r} is no address: use 'local', 'auto', 'HOST:PORT' or 'ray://HOST:PORT'"
        )
    return match["host"].strip("[]"), int(match["port"])
