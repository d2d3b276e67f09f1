"""An address is tried before a job is sent there: what answers, and what the user gets to know."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.submitting import exit_code
from orchestrator.client.ray_submission import NotRay, RayCluster, check_ray
from orchestrator.cluster.ports import free_ports
from workers.protocol.errors import JobError

VERSION = b'{"version": "4", "ray_version": "2.60.0"}'


@contextmanager
def answering(code: int, kind: str, text: bytes) -> Iterator[str]:
    """The URL of a server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [(200, "application/json", VERSION), (401, "text/plain; charset=utf-8", b"Unauthorized: Missing token")],
)
def test_ray_is_known_by_its_version_and_by_how_it_refuses(code: int, kind: str, text: bytes) -> None:
    with answering(code, kind, text) as url:
        check_ray(url)


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (200, "application/json", b"[]"),
        (200, "text/html", b"<html>"),
        (404, "text/plain", b"not found"),
        (401, "application/problem+json", b"{}"),
    ],
)
def test_another_service_is_no_cluster(code: int, kind: str, text: bytes) -> None:
    with (
        answering(code, kind, text) as url,
        pytest.raises(NotRay, match=f"{url} answers, but not as a Ray cluster: tried GET {url}/api/version"),
    ):
        RayCluster(url)


def test_an_unreachable_cluster_is_named_with_what_was_tried() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(JobError, match=f"no cluster answers at {url}: tried GET {url}/api/version .*refused"):
        RayCluster(url)
    for wrong in ("head:8265", "http://", "ray://head:10001"):
        with pytest.raises(JobError, match=f"--address {wrong} is no URL: write http://HOST:8265"):
            RayCluster(wrong)


def test_the_address_that_was_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    with answering(200, "application/json", VERSION) as url:
        assert RayCluster(url + "/").address == url


def test_a_token_that_is_missing_or_wrong_is_said() -> None:
    with (
        answering(403, "text/plain", b"Forbidden: Invalid authentication token") as url,
        pytest.raises(
            JobError, match=r"asks for its token: set RAY_AUTH_MODE=token .*Invalid authentication"
        ),
    ):
        RayCluster(url)


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        (JobStatus.SUCCEEDED, 0, DONE),
        (JobStatus.STOPPED, None, INTERRUPTED),
        (JobStatus.FAILED, 7, 7),
        (JobStatus.FAILED, None, FAILED),
    ],
)
def test_the_exit_code_is_the_jobs(
    status: JobStatus, driver: int | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    end = JobDetails(
        type=JobType.SUBMISSION,
        entrypoint="",
        status=status,
        driver_exit_code=driver,
        message="no such image",
    )
    assert exit_code(end) == code
    assert ("no such image" in capsys.readouterr().err) == (code == FAILED)
