"""Where the pages of a cluster's Freshet service are: the service writes its address into Ray's key-value store.

Not here: the service and its pages.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import psutil

from orchestrator.cluster.here import find
from workers.protocol.errors import JobError

KEY = b"freshet/dashboard"
SPACE = b"freshet"
GCS_PORT = 6379
"""Where `ray start --head` has its control store (GCS), unless told otherwise."""
CONNECT_S = 2.0


def announce(url: str) -> None:
    """Write down that the service's pages are at `url`. This process is a driver of the cluster."""
    _own_store().internal_kv_put(KEY, url.encode(), True, SPACE)


def withdraw(url: str) -> None:
    """Remove the announcement of `url`, unless another service has announced itself since."""
    store = _own_store()
    if store.internal_kv_get(KEY, SPACE, timeout=CONNECT_S) == url.encode():
        store.internal_kv_del(KEY, False, SPACE, timeout=CONNECT_S)


def page_address(address: str = "auto") -> str | None:
    """The address of the pages; None if no service has announced itself, or the cluster's store is out of reach.

    Args:
        address: `auto`, `HOST:PORT`, or `http://HOST:PORT` of Ray's own dashboard.
    """
    import ray
    from ray.exceptions import RayError

    with suppress(JobError, RayError, OSError, RuntimeError, ValueError):
        if address == "auto" and ray.is_initialized():
            return _text(_own_store().internal_kv_get(KEY, SPACE))
        address = find(address).address if address == "auto" else address
        if (found := _store_of(address)) is None:
            return None
        store = _store(found)
        if "://" not in address or _serves(store, urlsplit(address).port):
            return _text(store.internal_kv_get(KEY, SPACE))
    return None


def _own_store() -> Any:
    import ray

    return _client(ray.get_runtime_context().gcs_address)


def _store(address: str) -> Any:
    """The store at `address`. Raises OSError at once where Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    return _client(address)


def _client(address: str) -> Any:
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    return GcsClient(address=address)


def _store_of(address: str) -> str | None:
    """Address of the store that the cluster at `address` has, or may have."""
    from ray._private import services

    if "://" not in address:
        return address
    host, port = urlsplit(address).hostname or "", urlsplit(address).port
    here = host == "localhost" or host.startswith("127.") or host == services.get_node_ip_address()
    return _store_here(port) if here else f"{host}:{GCS_PORT}"


def _store_here(port: int | None) -> str | None:
    """Address of the store whose cluster has its dashboard on this machine, at `port`: other clusters may be here, too,
    and want other tokens."""
    for process in psutil.process_iter(["cmdline"]):
        parts = process.info["cmdline"] or []
        if f"--port={port}" in parts and any(part.endswith("dashboard/dashboard.py") for part in parts):
            return next((part.partition("=")[2] for part in parts if part.startswith("--gcs-address=")), None)
    return None


def _serves(store: Any, port: int | None) -> bool:
    """Whether Ray's dashboard of this store's cluster has `port`."""
    from ray._private import ray_constants

    found = store.internal_kv_get(
        ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    )
    return found is not None and found.decode().rpartition(":")[2] == str(port)


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None else None
