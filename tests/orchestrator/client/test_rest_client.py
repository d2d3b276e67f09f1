"""The client of a Freshet service: tokens, errors, and what it refuses to do. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here
from fastapi import FastAPI
from serving import listening, served, settings_in

from dashboard.service import problems
from dashboard.service.access import Role
from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.cli.submitting import answers_as_service
from orchestrator.client.access_token import PLAIN_HTTP, TOKEN, TOKEN_FILE, find_credentials
from orchestrator.client.errors import (
    ControllerSilent,
    NoController,
    NoSuchJob,
    Refused,
    ServiceError,
    ServiceUnreachable,
)
from orchestrator.client.jobs import Command
from orchestrator.client.opening import ADDRESS, opened
from orchestrator.client.rest_client import RestJobClient
from orchestrator.history.command_table import CommandIdReused
from orchestrator.history.proposal import PlanChanged
from orchestrator.spec.job_spec import Spec
from workers.protocol.errors import JobError

SECRET = "s3cret-that-nobody-may-read"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a service without a cluster, and its token file."""
    settings = settings_in(tmp_path_factory.mktemp("service"))
    with served(settings) as address:
        yield address, settings.tokens


@pytest.fixture(autouse=True)
def _no_tokens_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (ADDRESS, TOKEN, TOKEN_FILE, PLAIN_HTTP):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def raw_server(*answers: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """A server that hands each request to the next of `answers` and sends what that returns; an empty text closes the
    connection. Yields its address and the requests so far."""
    requests: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    requests.append(_request(connection))
                    connection.sendall(answer(requests[-1]).encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _request(connection: socket.socket) -> str:
    """One whole request."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(65536)
    head, _, body = text.partition(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ),
        0,
    )
    while len(body) < length:
        body += connection.recv(65536)
    return (head + b"\r\n\r\n" + body).decode()


def http(status: str, body: str = "", *headers: str, kind: str = "application/json") -> str:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, *headers, "", body])


def accepted(request: str) -> str:
    return http("202 Accepted", json.dumps({"job": "gpt", "id": "x", "text": "pauses"}))


def lost(request: str) -> str:
    return ""


def rest(address: str, home: Path, **environment: str) -> RestJobClient:
    return RestJobClient(address, environment, home)


@pytest.mark.parametrize(
    "error",
    [
        NoSuchJob("no job 'gtp' is running at auto; did you mean 'gpt'?"),
        NoController("the controller of job 'gpt' is gone"),
        ControllerSilent("the controller of job 'gpt' has not answered for 90 s"),
        Refused("the job is paused"),
        CommandIdReused("command id 'x' was used for stop"),
        PlanChanged("look at plan 2.7", 2, 7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_error_of_a_controller_arrives_as_itself(error: JobError, tmp_path: Path) -> None:
    app = FastAPI()
    problems.install(app)

    @app.post("/api/v1/jobs/gpt/pause")
    async def pause() -> None:
        raise error

    with listening(app) as address, pytest.raises(type(error)) as raised:
        asyncio.run(rest(address, tmp_path).pause("gpt"))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    if isinstance(raised.value, PlanChanged):
        assert (raised.value.epoch, raised.value.version) == (2, 7)


def test_the_token_comes_from_the_environment_then_a_named_file_then_the_home_folder(
    service: tuple[str, Path], tmp_path: Path
) -> None:
    address, tokens = service
    home = tmp_path / "home"
    (home / ".freshet").mkdir(parents=True)
    (home / ".freshet" / "tokens.json").write_bytes(tokens.read_bytes())
    (home / ".freshet" / "tokens.json").chmod(0o600)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"control": SECRET}))
    wrong.chmod(0o600)
    assert asyncio.run(rest(address, home).jobs()) == ()
    assert asyncio.run(rest(address, tmp_path, FRESHET_TOKEN_FILE=str(tokens)).jobs()) == ()
    with pytest.raises(ServiceError, match=r"that of .*wrong\.json is not valid there"):
        asyncio.run(rest(address, home, FRESHET_TOKEN_FILE=str(wrong)).jobs())
    with pytest.raises(ServiceError, match="that of FRESHET_TOKEN is not valid there") as refused:
        asyncio.run(rest(address, home, FRESHET_TOKEN=SECRET, FRESHET_TOKEN_FILE=str(tokens)).jobs())
    assert refused.value.status == 401
    with pytest.raises(ServiceError, match=r"no valid token .* at http.*: set FRESHET_TOKEN"):
        asyncio.run(rest(address, tmp_path).jobs())


@pytest.mark.parametrize(
    "address", ["https://example.com", "https://10.0.0.7:8270", "https://127.0.0.1.example.com"]
)
def test_the_token_of_this_machine_s_service_stays_on_it(address: str, tmp_path: Path) -> None:
    file = tmp_path / ".freshet" / "tokens.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"control": SECRET}))
    file.chmod(0o600)
    for here in ("https://localhost:8270", "http://127.0.0.1:8270", "http://[::1]:8270"):
        assert find_credentials(here, {}, tmp_path).token == SECRET
    with pytest.raises(
        JobError, match=f"no token for {address}: set FRESHET_TOKEN, or FRESHET_TOKEN_FILE"
    ) as none:
        rest(address, tmp_path)
    assert SECRET not in str(none.value)
    assert find_credentials(address, {TOKEN_FILE: str(file)}, tmp_path).token == SECRET


def test_the_control_token_is_preferred_and_a_read_token_reads(
    service: tuple[str, Path], tmp_path: Path
) -> None:
    address, tokens = service
    known = json.loads(tokens.read_text())
    assert find_credentials(address, {TOKEN_FILE: str(tokens)}, tmp_path).token == known["control"]
    only = tmp_path / "read.json"
    only.write_text(json.dumps({"read": known["read"]}))
    only.chmod(0o600)
    client = rest(address, tmp_path, FRESHET_TOKEN_FILE=str(only))
    assert asyncio.run(client.jobs()) == ()
    with pytest.raises(
        ServiceError, match=r"the read token changes nothing .*use the control token"
    ) as refused:
        asyncio.run(client.pause("gpt"))
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ('{"control": "x"}', 0o644, r"others may read the token file .* \(mode 644\): chmod 600 it"),
        (SECRET, 0o600, "is no token file"),
        ("[]", 0o600, "is no token file"),
        (None, 0o600, "cannot read the token file .*: No such file"),
    ],
)
def test_a_token_file_that_is_none_is_refused_without_its_content(
    content: str | None, mode: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(JobError, match=said) as refused:
        rest("http://127.0.0.1:1", tmp_path, FRESHET_TOKEN_FILE=str(path))
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://10.0.0.7:8270", "plain HTTP to another machine.*FRESHET_PLAIN_HTTP=1"),
        ("HTTP://example.com", "plain HTTP to another machine"),
        (f"https://me:{SECRET}@example.com", "holds a password: name it as https://example.com"),
        ("https://example.com/?a=1", "is no address of a service"),
        ("http://127.0.0.1:99999", "is no URL"),
        ("http://", "is no address of a service"),
    ],
)
def test_an_address_that_a_token_must_not_go_to_is_refused(address: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=said) as refused:
        rest(address, tmp_path, FRESHET_TOKEN=SECRET)
    assert SECRET not in str(refused.value)
    if "10.0.0.7" in address:
        rest(address, tmp_path, FRESHET_TOKEN=SECRET, FRESHET_PLAIN_HTTP="1")


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with raw_server(accepted) as (elsewhere, seen):

        def redirect(request: str) -> str:
            return http("307 Temporary Redirect", "", f"Location: {elsewhere}/api/v1/jobs")

        with (
            raw_server(redirect) as (address, _),
            pytest.raises(ServiceUnreachable, match=f"redirects to {elsewhere}/.*no token is sent"),
        ):
            asyncio.run(rest(address, tmp_path, FRESHET_TOKEN=SECRET).jobs())
        assert seen == []
        with socket.create_connection(("127.0.0.1", int(elsewhere.rpartition(":")[2]))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")


def test_no_proxy_sees_a_token_that_goes_to_this_machine(
    service: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, tokens = service
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert asyncio.run(rest(address, tmp_path, FRESHET_TOKEN_FILE=str(tokens)).jobs()) == ()


def test_nobody_at_the_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    caplog.set_level(logging.DEBUG)
    with pytest.raises(
        ServiceUnreachable,
        match=rf"no Freshet service answers at http://127\.0\.0\.1:{port} \(.*tried 3 times in",
    ) as refused:
        asyncio.run(rest(f"http://127.0.0.1:{port}", tmp_path, FRESHET_TOKEN=SECRET).jobs())
    assert refused.value.__cause__ is None
    assert SECRET not in caplog.text + "".join(traceback.format_exception(refused.value))


def test_another_service_at_the_address(tmp_path: Path) -> None:
    for answer in (
        http("404 Not Found", "<html>", kind="text/html"),
        http("200 OK", "<html>", kind="text/html"),
        http("200 OK", "[]"),
    ):
        with (
            raw_server(lambda request, answer=answer: answer) as (address, _),
            pytest.raises(ServiceUnreachable, match=f"{address} is no Freshet service"),
        ):
            asyncio.run(rest(address, tmp_path).jobs())


def test_a_command_whose_answer_is_lost_is_sent_again_with_its_id(tmp_path: Path) -> None:
    with raw_server(lost, accepted) as (address, seen):
        command = asyncio.run(rest(address, tmp_path).pause("gpt"))
    assert command.text == "pauses"
    keys = [line for request in seen for line in request.splitlines() if line.startswith("Idempotency-Key")]
    assert keys == [f"Idempotency-Key: {command.id}"] * 2


def test_a_submission_is_sent_again_with_its_key_until_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its answer is lost. The job's state does not count: it may be that of an earlier run."""
    monkeypatch.setattr("orchestrator.client.rest_client.PAUSE_S", 0.0)
    spec = Spec.model_validate({"job": {"name": "gpt"}})

    def undecided(request: str) -> str:
        return http("202 Accepted", json.dumps({"job": "gpt", "folder": "runs/gpt", "accepted": False}))

    def begun(request: str) -> str:
        return http("202 Accepted", json.dumps({"job": "gpt", "folder": "runs/gpt", "accepted": True}))

    def refused(request: str) -> str:
        problem = json.dumps({"type": "about:blank", "status": 422, "detail": "nothing fits the memory"})
        return http("422 Unprocessable Content", problem, kind="application/problem+json")

    with raw_server(lost, undecided, undecided, begun) as (address, seen):
        assert asyncio.run(rest(address, tmp_path).submit(spec, resume=True)).folder == "runs/gpt"
    assert {request.split()[0] for request in seen} == {"POST"}
    assert {request.partition("\r\n\r\n")[2] for request in seen} == {
        '{"spec":{"job":{"name":"gpt"}},"resume":true}'
    }
    keys = [line for request in seen for line in request.splitlines() if line.startswith("Idempotency-Key")]
    assert (len(keys), len({*keys})) == (4, 1)
    with (
        raw_server(undecided, refused) as (address, _),
        pytest.raises(JobError, match="nothing fits the memory"),
    ):
        asyncio.run(rest(address, tmp_path).submit(spec))


def test_every_control_sends_what_the_service_takes(tmp_path: Path) -> None:
    sent: list[tuple[str, Any]] = []

    def take(request: str) -> str:
        head, _, body = request.partition("\r\n\r\n")
        path = head.split()[1].removeprefix("/api/v1/jobs/gpt/")
        tag = next((line for line in head.splitlines() if line.startswith("If-Match")), "")
        sent.append((f"{path} {tag}".strip(), json.loads(body) if body else None))
        return accepted(request)

    calls: list[Callable[[RestJobClient], Any]] = [
        lambda client: client.stop("gpt"),
        lambda client: client.abort("gpt"),
        lambda client: client.move("gpt", "3-4", 1),
        lambda client: client.drain("gpt", "10.0.0.7", 5.0),
        lambda client: client.undrain("gpt", "10.0.0.7"),
        lambda client: client.scale("gpt", spares=1),
        lambda client: client.freeze("gpt", r_max=0.5),
        lambda client: client.fault("gpt", {"node": "ab"}),
        lambda client: client.apply("gpt", (1, 2), base=(3, 4)),
        lambda client: client.apply("gpt", (1, 2)),
        lambda client: client.move("gpt", "3", 1, base=(3, 4)),
        lambda client: client.drain("gpt", "10.0.0.7", base=(3, 4)),
        lambda client: client.scale("gpt", spares=1, base=(3, 4)),
        lambda client: client.freeze("gpt", r_max=0.5, base=(3, 4)),
    ]
    with raw_server(*[take] * len(calls)) as (address, _):
        client = rest(address, tmp_path)
        for call in calls:
            asyncio.run(call(client))
    assert sent == [
        ("cancel", {"abort": False}),
        ("cancel", {"abort": True}),
        ("move", {"layers": "3-4", "rank": 1}),
        ("drain", {"node": "10.0.0.7", "deadline_s": 5.0}),
        ("undrain", {"node": "10.0.0.7"}),
        ("scale", {"ranks": None, "pipelines": None, "spares": 1}),
        ("freeze", {"method": None, "r_max": 0.5, "least_update": None, "alpha": None, "prefix": None}),
        ("faults", {"node": "ab"}),
        ('plan If-Match: "3.4"', {"partition": [1, 2]}),
        ("plan", {"partition": [1, 2]}),
        ('move If-Match: "3.4"', {"layers": "3", "rank": 1}),
        ('drain If-Match: "3.4"', {"node": "10.0.0.7", "deadline_s": 30.0}),
        ('scale If-Match: "3.4"', {"ranks": None, "pipelines": None, "spares": 1}),
        (
            'freeze If-Match: "3.4"',
            {"method": None, "r_max": 0.5, "least_update": None, "alpha": None, "prefix": None},
        ),
    ]


def test_an_outcome_is_waited_for_until_its_time_is_over(tmp_path: Path) -> None:
    def undecided(request: str) -> str:
        return http("200 OK", json.dumps({"job": "gpt", "id": "x", "text": "", "done": None, "step": None}))

    def decided(request: str) -> str:
        return http(
            "200 OK", json.dumps({"job": "gpt", "id": "x", "text": "paused", "done": True, "step": 4})
        )

    command = Command(job="gpt", id="x", text="")
    with raw_server(undecided, decided) as (address, _):
        assert asyncio.run(rest(address, tmp_path).outcome(command)).step == 4
    with (
        raw_server(undecided) as (address, _),
        pytest.raises(TimeoutError, match="has not decided command 'x'"),
    ):
        asyncio.run(rest(address, tmp_path).outcome(command, timeout_s=0.0))


@pytest.mark.parametrize("job", ["../cluster", "a/b", "", "a b"])
def test_a_name_that_no_job_has_is_not_asked_for(job: str, tmp_path: Path) -> None:
    with pytest.raises(NoSuchJob, match="no job is called"):
        asyncio.run(rest("http://127.0.0.1:1", tmp_path).view(job))


@pytest.mark.parametrize("id", ["", "a b", "a/b", "ü", "x" * 201])
def test_a_command_id_that_a_header_cannot_carry_is_refused(id: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="a command id"):
        asyncio.run(rest("http://127.0.0.1:1", tmp_path).pause("gpt", id=id))


def test_commands_take_the_address_of_the_environment(
    service: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address, tokens = service
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setenv(TOKEN, json.loads(tokens.read_text())[Role.READ])
    assert freshet_here("jobs", "--json") == DONE
    assert json.loads(capsys.readouterr().out) == {"jobs": []}
    assert freshet_here("status") == DONE
    assert capsys.readouterr().out == "no job is running\n"
    for words in (("status", "gpt"), ("events", "gpt"), ("timeline", "--job", "gpt")):
        assert freshet_here(*words) == USER_ERROR
        assert "there is no job 'gpt'; running: none" in capsys.readouterr().err
    with opened() as client, pytest.raises(NoSuchJob):
        client.view("gpt")


def test_a_control_needs_a_cluster_behind_the_service(
    service: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address, tokens = service
    monkeypatch.setenv(TOKEN_FILE, str(tokens))
    assert freshet_here("pause", "gpt", "--address", address) == USER_ERROR
    assert "this service shows past runs and has no cluster" in capsys.readouterr().err


def test_freshet_submit_knows_a_service_from_other_servers(
    service: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, tokens = service
    monkeypatch.setenv(TOKEN_FILE, str(tokens))
    spec = tmp_path / "job.toml"
    spec.write_text('[job]\nname = "a"\nstpes = 3\n')
    assert freshet_here("submit", str(spec), "--address", address) == USER_ERROR
    assert "did you mean 'steps'" in capsys.readouterr().err
    spec.write_text(f'[job]\nname = "a"\noutput = "{tokens.parent / "a"}"\n')
    assert freshet_here("submit", str(spec), "--address", address) == USER_ERROR
    assert "this service shows past runs and has no cluster" in capsys.readouterr().err
    with raw_server(lambda request: http("404 Not Found", "{}")) as (other, _):
        assert not answers_as_service(other)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "Give a spec, or --job"),
        (("plan", "a.toml", "--apply"), "--partition, --apply and --wait go with --job"),
        (("plan", "--job", "a", "--set", "job.steps=1"), "go with a spec, not with --job"),
        (("plan", "--job", "a", "--partition", "3,0"), "expected the layers per stage, such as 3,1,2,2"),
        (("timeline",), "Give a job's output folder, or --job"),
        (("scale", "a"), "Give one or more of --ranks, --pipelines, --spares"),
        (("freeze", "a"), "Give one or more of --method, --r-max, --least-update, --alpha, --prefix"),
        (("follow", "a", "--address", "http://127.0.0.1:8270"), "freshet events a --follow"),
    ],
)
def test_words_that_do_not_go_together(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freshet_here(*words) == USER_ERROR
    assert said in capsys.readouterr().err
