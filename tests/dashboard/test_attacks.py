"""Senders that hold connections or send what no client would, against the service's own process over its own socket."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import httpx
import pytest
from serving import made_runs, service_process

HANG = """
import time
import dashboard.service.http_connection as connection, dashboard.server as server
from dashboard.service.guard import Guard
connection.HEAD_S = 2.0
server.ENDS_S = 1
check = Guard.check
def hang(guard, scope, *rest):
    return time.sleep(600) if scope["path"] == "/hang" else check(guard, scope, *rest)
Guard.check = hang
"""
"""A request for `/hang` stops the event loop; heads have 2 s."""
OPEN = 400
Service = tuple[httpx.Client, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    made_runs(folder / "runs")
    with service_process(folder, patch=HANG) as service:
        yield service


def connection(service: Service) -> socket.socket:
    address = urlsplit(str(service[0].base_url))
    return socket.create_connection((address.hostname, address.port), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def ask(service: Service, request: bytes) -> tuple[int, str]:
    """(status, answer) of one request on a connection of its own, as it is sent."""
    with closing(connection(service)) as sending:
        sending.sendall(request)
        text = answer(sending).decode()
    return int(text.split()[1]), text


def request(*headers: str, target: str = "/healthz", method: str = "GET") -> bytes:
    lines = (f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def test_connections_without_a_request_keep_nobody_out(service: Service) -> None:
    """More of them than one address may have: the oldest go, and a client with a token does not notice."""
    client, _ = service
    with ExitStack() as held:
        senders = []
        for number in range(OPEN):
            sender = held.enter_context(closing(connection(service)))
            sender.sendall(b"GET / HTTP/1.1\r\nX-Slow: " if number % 2 else b"")
            senders.append(sender)
        began_s = time.monotonic()
        with httpx.Client(base_url=client.base_url, headers=client.headers, trust_env=False) as other:
            for reader in (client, other):
                assert reader.get("/api/v1/runs", timeout=20).status_code == 200
        assert time.monotonic() - began_s < 20
        assert answer(senders[0]) == b""  # made room
        *_, silent, slow = senders
        assert answer(silent) == b""
        assert answer(slow).startswith(b"HTTP/1.1 408 ")


def test_headers_that_never_end_are_answered_in_time(service: Service) -> None:
    with closing(connection(service)) as sender:
        sender.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        began_s, number = time.monotonic(), 0
        sender.settimeout(0.05)
        text = b""
        while not text and time.monotonic() - began_s < 20:
            number += 1
            try:
                sender.sendall(f"X-{number}: 1\r\n".encode())
                text = sender.recv(65_536)
            except TimeoutError:
                continue
        assert text.startswith(b"HTTP/1.1 408 "), text
        assert b'"action":"Send it again."' in text
        assert time.monotonic() - began_s >= 1.9


def test_the_rest_of_a_request_that_was_answered_has_as_long(service: Service) -> None:
    """A body that nobody reads must not hold the connection either."""
    with closing(connection(service)) as sender:
        sender.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n")
        sender.settimeout(0.05)
        began_s, text = time.monotonic(), b""
        while time.monotonic() - began_s < 20:
            try:
                sender.sendall(b"x")
                if not (part := sender.recv(65_536)):
                    break
                text += part
            except TimeoutError:
                continue
            except OSError:
                break
        assert text.startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began_s < 15


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        (request(*(f"X-{n}: 1" for n in range(10_000))), 431, "100 are the most"),
        (request(*(f"X-{n}: 1" for n in range(101))), 431, "100 are the most"),
        (request(f"X: {'x' * 33_000}"), 431, "more than 32,768 bytes"),
        (request(target="/healthz?" + "x" * 100_000), 414, "more than 8,192 bytes"),
        (request(target="/" + "x" * 9_000), 414, "more than 8,192 bytes"),
        (
            request("Content-Length: 4", "Transfer-Encoding: chunked", method="POST", target="/logout")
            + b"0\r\n\r\n",
            400,
            "both Content-Length and Transfer-Encoding",
        ),
        (
            request("TRANSFER-ENCODING: chunked", "content-length:4", method="POST", target="/logout"),
            400,
            "both Content-Length and Transfer-Encoding",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "Invalid HTTP request"),
    ],
    ids=[
        "10,000 headers",
        "101 headers",
        "long header",
        "long query",
        "long path",
        "both",
        "BOTH",
        "no HTTP",
    ],
)
def test_what_no_client_sends_is_refused_in_words(
    service: Service, sent: bytes, status: int, why: str
) -> None:
    found, text = ask(service, sent)
    assert (found, why in text) == (status, True), text
    assert "application/problem+json" in text
    assert '"action":"' in text


def test_what_clients_send_is_not_refused(service: Service) -> None:
    assert ask(service, request(*(f"X-{n}: 1" for n in range(90))))[0] == 200
    assert ask(service, request(f"Cookie: a={'x' * 8_000}"))[0] == 200
    assert ask(service, request(target="/healthz?" + "x" * 8_000))[0] == 200
    # Two requests that are sent at once are both answered, the second in its turn.
    both = request(target="/healthz").replace(b"Connection: close\r\n", b"") + request(target="/static/none")
    assert ask(service, both)[1].count("HTTP/1.1 ") == 2
    both = request().replace(b"Connection: close\r\n", b"") + request(target="/" + "x" * 9_000)
    text = ask(service, both)[1]
    assert ("HTTP/1.1 200" in text, "HTTP/1.1 414" in text) == (True, True)


def test_a_service_that_hangs_ends_when_it_is_asked_to_and_its_log_is_short(service: Service) -> None:
    client, process = service
    for _ in range(50):
        assert ask(service, b"nonsense\r\n\r\n")[0] == 400
    with pytest.raises(httpx.ReadTimeout):
        client.get("/hang", timeout=1)
    process.terminate()
    _, said = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "Timeout" in said
    lines = [line for line in said.splitlines() if "WARNING" in line]
    assert any("Invalid HTTP request" in line for line in lines)
    assert len(lines) < 60, said
