"""A local stand-in for a cloud's metadata service, with answers that a test supplies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer of the service."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class MetadataService:
    """A service that answers with `serve`, which gets method, path with query, and lower-case headers."""

    serve: Callable[[str, str, Mapping[str, str]], Reply]
    base: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of every request so far."""


@contextmanager
def metadata_service(serve: Callable[[str, str, Mapping[str, str]], Reply]) -> Iterator[MetadataService]:
    """A service on a free port of this machine."""
    service = MetadataService(serve)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            service.asked.append((self.command, self.path))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = service.serve(self.command, self.path, headers)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body.encode())))
            self.end_headers()
            self.wfile.write(reply.body.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.base = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
