"""Chooses the client of the jobs at an address: a driver of the cluster, or requests to a Freshet service. What one way
needs is imported only for that one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.blocking_client import BlockingJobs

ADDRESS = "FRESHET_ADDRESS"
"""Environment variable with the address that a command uses if it names none."""


@contextmanager
def opened(address: str | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[BlockingJobs]:
    """A blocking client of the jobs at `address`.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT` for a Ray cluster, whose driver this process becomes; standard
            error says which one `auto` was;
            `http://HOST:PORT` or `https://HOST:PORT` for a Freshet service; None: that of `FRESHET_ADDRESS`, else
            `auto`.

    Raises:
        JobError: it is no address, nothing answers there, or the token must not be sent there.
    """
    from orchestrator.client.blocking_client import BlockingJobClient, BlockingJobs

    address = address_or_default(address, environment)
    if is_service(address):
        from orchestrator.client.rest_client import RestJobClient

        yield BlockingJobs(RestJobClient(address, environment))
        return
    from orchestrator.client.asking import joined

    with joined(address) as connection:
        yield BlockingJobClient(connection.address)


def address_or_default(address: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """`address`; if it is None, that of `FRESHET_ADDRESS`, else `auto`."""
    return address if address is not None else environment.get(ADDRESS) or "auto"


def is_service(address: str) -> bool:
    """Whether `address` is that of a Freshet service."""
    return address.lower().startswith(("http://", "https://"))
