"""How the service joins and leaves its cluster: what child processes inherit, and how it ends without the cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from fastapi import FastAPI

from dashboard import server

ADDRESS, URL = "10.0.0.1:6379", "http://127.0.0.1:8270/"


class ProcessEnded(BaseException):
    """In place of the end of this process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def end(code: int) -> None:
    raise ProcessEnded(code)


@pytest.fixture
def withdraw_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Takes what withdraws the address."""
    monkeypatch.setattr(server, "announce", lambda url: None)
    monkeypatch.setattr(os, "_exit", end)
    return lambda withdraw: monkeypatch.setattr(server, "withdraw", withdraw)


def serve(ends: BaseException | None = None) -> None:
    """A service whose pages are announced, and which `ends`."""
    with server._announced(ADDRESS, URL):
        if ends is not None:
            raise ends


def refuse(url: str) -> None:
    raise ConnectionError("failed to connect to all addresses")


@pytest.mark.parametrize(
    ("error", "code", "logged"),
    [
        (None, 0, False),
        (SystemExit(15), 15, False),
        (SystemExit(), 0, False),
        (SystemExit("no"), 1, True),
        (KeyboardInterrupt(), 130, False),
        (ZeroDivisionError("a mistake"), 1, True),
    ],
    ids=repr,
)
def test_without_its_cluster_the_process_ends_as_the_service_did(
    withdraw_with: Callable[[Callable[[str], None]], None],
    caplog: pytest.LogCaptureFixture,
    error: BaseException | None,
    code: int,
    logged: bool,
) -> None:
    withdraw_with(refuse)
    with pytest.raises(ProcessEnded) as ended:
        serve(error)
    assert ended.value.code == code
    failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info and record.exc_info[1] for record in failures] == [error] * logged


@pytest.fixture
def rays_handler() -> Iterator[None]:
    """SIGTERM is a failure, as Ray has it in a driver."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("rays_handler")
def test_a_service_that_is_asked_to_end_has_not_failed(
    withdraw_with: Callable[[Callable[[str], None]], None],
) -> None:
    """With its cluster it ends in order, without it at once: both as a service that has done what it was asked."""
    end = uvicorn.Server(uvicorn.Config(FastAPI()))

    def serve() -> None:
        with server._announced(ADDRESS, URL), server._sigterm_ends(end), end.capture_signals():
            signal.raise_signal(signal.SIGTERM)

    withdraw_with(lambda url: None)
    serve()
    assert end.should_exit
    withdraw_with(refuse)
    with pytest.raises(ProcessEnded) as ended:
        serve()
    assert ended.value.code == 0
    # From then on it is Ray's again.
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)


def test_a_refusal_is_told_at_once(
    withdraw_with: Callable[[Callable[[str], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "LEAVE_S", threading.TIMEOUT_MAX)
    withdraw_with(refuse)
    with pytest.raises(ProcessEnded):
        serve()
    assert "the cluster at 10.0.0.1:6379: failed to connect to all addresses" in caplog.text


def test_silence_is_told_after_a_while(
    withdraw_with: Callable[[Callable[[str], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "LEAVE_S", 0.01)
    answer = threading.Event()
    withdraw_with(lambda url: answer.wait(60) and None)
    with pytest.raises(ProcessEnded):
        serve()
    answer.set()
    assert "the cluster at 10.0.0.1:6379: it does not answer" in caplog.text


def test_with_its_cluster_the_service_withdraws_its_address_and_ends_in_order(
    withdraw_with: Callable[[Callable[[str], None]], None],
) -> None:
    withdrawn: list[str] = []
    withdraw_with(withdrawn.append)
    with pytest.raises(SystemExit):
        serve(SystemExit(15))
    assert withdrawn == [URL]
