"""Runs the service until a signal ends it."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import uvicorn

from dashboard.service.app import create_app
from dashboard.service.settings import Settings
from orchestrator.client.access_token import is_loopback
from orchestrator.client.asking import joined
from orchestrator.client.errors import JobError
from orchestrator.client.page_address import announce, withdraw

log = logging.getLogger(__name__)

CLOSE_S = 3
STALLED_MS = 20_000
LEAVE_S = 3.0
CLUSTER_LOST_S = 3600
"""How long the service goes on without its cluster. Ray would end the process after a minute."""


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        say: receives the address and where the token is, for people.

    Raises:
        JobError: there is no cluster at the address, the port is taken, or TLS is half set up.
    """
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise JobError("TLS needs both --tls-cert and --tls-key")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(CLUSTER_LOST_S))
    listener = listener_of(settings)
    with listener, _cluster(settings.address):
        app = create_app(settings)
        scheme = "https" if settings.tls_certificate is not None else "http"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"{scheme}://{host}:{listener.getsockname()[1]}/"
        say(f"dashboard: {url}  token in {settings.tokens}")
        if scheme == "http" and not is_loopback(settings.host):
            say(
                "warning: without TLS the token crosses the network in the clear: use --tls-cert and --tls-key"
            )
        config = uvicorn.Config(
            app,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            # Whoever forwards requests could say that they come from anywhere.
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_S,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=str(settings.tls_key) if settings.tls_key is not None else None,
        )
        server = uvicorn.Server(config)
        if settings.until_input_ends:
            _end_with_input(server)
        with _announced(settings.address, url):
            server.run(sockets=[listener])


def _cluster(address: str | None) -> AbstractContextManager[object]:
    return joined(address) if address is not None else nullcontext()


@contextmanager
def _announced(address: str | None, url: str) -> Iterator[None]:
    """Tell the cluster's `freshet submit` where the pages are, until the end. With a cluster that is gone the process
    ends here: Ray's farewell would wait for it."""
    if address is None:
        yield
        return
    announce(url)
    try:
        yield
    finally:
        if not _done_within(LEAVE_S, partial(withdraw, url)):
            log.warning("the cluster at %s does not answer: the service ends without a farewell", address)
            sys.stdout.flush()
            os._exit(0)


def _done_within(limit_s: float, work: Callable[[], None]) -> bool:
    """Whether `work` succeeds in time; if not it may go on."""
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):
            work()
            done.set()

    threading.Thread(target=run, daemon=True).start()
    return done.wait(limit_s)


def listener_of(settings: Settings) -> socket.socket:
    """The socket on which the service listens.

    Raises:
        JobError: the port is taken, or there is no such address.
    """
    host = settings.host
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, settings.port))
        except OSError:
            if not settings.any_port:
                raise
            listener.bind((host, 0))
    except OSError as error:
        raise JobError(
            f"cannot listen on {host}:{settings.port}: {error.strerror or error}; choose another --port, or 0 for any"
        ) from error
    # A connection whose peer takes nothing ends, with what was kept for it; connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    listener.listen(512)
    return listener


def _end_with_input(server: uvicorn.Server) -> None:
    """End `server` when standard input does: with the process that started this one."""

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        server.should_exit = True

    threading.Thread(target=wait, daemon=True).start()
