"""Runs the service until a signal ends it."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn

from dashboard.app import create_app
from dashboard.service.door import Door, Visit
from dashboard.service.guard import in_url, is_wildcard
from dashboard.service.http_connection import HttpConnection
from dashboard.service.limits import FewOfAKind
from dashboard.service.services import Services
from dashboard.service.settings import ServiceSettings
from orchestrator.client.access_token import is_loopback
from orchestrator.client.asking import joined
from orchestrator.client.errors import JobError
from orchestrator.client.page_address import announce, withdraw

log = logging.getLogger(__name__)

CLOSE_S = 3
STALLED_MS = 20_000
LEAVE_S = 3.0
ENDS_S = 30
"""Seconds after a signal in which the service ends in order. Whatever hangs then, the process ends."""
GIVE_WAY_S = 0.001
"""Interpreter's thread switch interval: the event loop needs several turns per answer while other threads compute."""


def serve(settings: ServiceSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Returns after SIGTERM; SIGINT raises `KeyboardInterrupt`.

    Args:
        say: receives the address and where the token is, for people.

    Raises:
        JobError: there is no cluster at the address, the port is taken, or TLS is half set up.
    """
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise JobError("TLS needs both --tls-cert and --tls-key")
    _log_to_stderr()
    sys.setswitchinterval(GIVE_WAY_S)
    listener = listener_of(settings)
    with ExitStack() as ending:
        ending.enter_context(listener)
        if settings.address is not None:
            ending.enter_context(joined(settings.address))
        app = create_app(settings)
        ending.push(partial(_leave_work_behind, app.state.services))
        scheme = "https" if settings.tls_certificate is not None else "http"
        url = f"{scheme}://{in_url(_reached_at(settings))}:{listener.getsockname()[1]}/"
        say(f"dashboard: {url}  token in {settings.tokens}")
        if scheme == "http" and not is_loopback(settings.host):
            say(
                "warning: without TLS the token crosses the network in the clear: use --tls-cert and --tls-key"
            )
        if is_wildcard(settings.host) and not settings.hosts:
            say(
                "warning: it listens on every address but answers only to requests for this machine's loopback: give"
                " its other names and addresses with --host-name"
            )
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            # Whoever forwards requests could say that they come from anywhere.
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_S,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=str(settings.tls_key) if settings.tls_key is not None else None,
        )
        server = Server(config, listener)
        if settings.until_input_ends:
            _end_with_input(server)
        with _announced(settings.address, url), _sigterm_ends(server):
            server.run()


class Server(uvicorn.Server):
    """Serves the connections that a `Door` lets in, and ends after a signal, whatever hangs."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._door: Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._door = Door(self._listener, self._answering, self.config.ssl)
        self._door.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            self._door.close()
        self._listener.close()
        await super().shutdown(sockets=[])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A thread that needs nothing of Python: it ends the process if an event loop or another thread does not.
        faulthandler.dump_traceback_later(ENDS_S, exit=True)
        super().handle_exit(sig, frame)

    def _answering(self, visit: Visit) -> HttpConnection:
        return HttpConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, visit=visit
        )


def _log_to_stderr() -> None:
    """Send the log of this process to standard error, a few lines of each kind."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(FewOfAKind())
    logging.getLogger().addHandler(handler)


def _leave_work_behind(services: Services, *ended_by: object) -> None:
    """End the process if threads are still at work: at its own end Python would wait for them."""
    if services.threads.busy:
        error = ended_by[1]
        _end_process(error if isinstance(error, BaseException) else None)


def _reached_at(settings: ServiceSettings) -> str:
    """A name or address of the service that it answers to."""
    if not is_wildcard(settings.host):
        return settings.host
    return next(iter(settings.hosts), "::1" if ":" in settings.host else "127.0.0.1")


@contextmanager
def _announced(address: str | None, url: str) -> Iterator[None]:
    """Tell the cluster's `freshet submit` where the pages are, until the end. With a cluster that is gone the process
    ends here, with the exit code of what ended the service: `ray.shutdown` would wait for the cluster."""
    if address is None:
        yield
        return
    announce(url)
    ended_by: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended_by = error
        raise
    finally:
        try:
            _do_within(LEAVE_S, partial(withdraw, url))
        except Exception as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else error
            log.warning(
                "the service ends without withdrawing its address from the cluster at %s: %s", address, why
            )
            _end_process(ended_by)


@contextmanager
def _sigterm_ends(server: uvicorn.Server) -> Iterator[None]:
    """Have SIGTERM end `server`, as it asks, and do no more: the server raises it again once it has ended, and Ray's
    handler would make a failure of that."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _do_within(limit_s: float, work: Callable[[], None]) -> None:
    """Do `work`, which may go on if it is not done in time.

    Raises:
        TimeoutError: it is not.
        Exception: what `work` raises.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    outcome.result(limit_s)


def _end_process(error: BaseException | None) -> NoReturn:
    """End the process as `error` would, but at once."""
    match error:
        case None | SystemExit(code=None):
            code = 0
        case SystemExit(code=int(code)):
            pass
        case KeyboardInterrupt():
            code = 128 + signal.SIGINT
        case _:
            code = 1
            log.error("the service has failed", exc_info=error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def listener_of(settings: ServiceSettings) -> socket.socket:
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
