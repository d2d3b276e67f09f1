"""Who gets in: every refusal of the guard, each with its line in the audit log."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from serving import audited, client_of, live_job, settings_in, show, token

from dashboard.app import create_app
from dashboard.pages.controls import CONTROLS
from dashboard.service import audit, guard
from dashboard.service.access import COOKIE, SESSION_S, Access, Role, open_tokens
from dashboard.service.audit import other_audit
from dashboard.service.guard import SIMULATIONS
from dashboard.service.guarded import POLICY
from dashboard.service.settings import MOST_BODY_BYTES, ServiceSettings

RUNS, CANCEL = "/api/v1/runs", "/api/v1/jobs/gpt/cancel"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    return settings_in(tmp_path_factory.mktemp("service"))


@pytest.fixture
def app(settings: ServiceSettings) -> FastAPI:
    """A service of its own for each test: rate limits start afresh."""
    return create_app(settings)


def ask(
    app: FastAPI, method: str, path: str, *, host: str = "127.0.0.1", **options: object
) -> httpx.Response:
    """One request without a token, unless `options` has one."""

    async def send() -> httpx.Response:
        async with client_of(app, host=host) as client:
            return await client.request(method, path, **options)  # pyright: ignore[reportArgumentType]

    return asyncio.run(send())


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def cookie(value: str) -> dict[str, str]:
    return {"Cookie": f"{COOKIE}={value}"}


def others(settings: ServiceSettings) -> list[dict[str, object]]:
    """The lines of the audit log that tell of no control."""
    file = other_audit(settings.audit)
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def refused(
    settings: ServiceSettings, answer: httpx.Response, status: int, why: str, *, control: bool = False
) -> None:
    """Assert that the answer is a problem, and that the audit log has it, among the controls if it is one."""
    assert answer.status_code == status, answer.text
    problem = answer.json()
    assert problem["status"] == status
    assert why in problem["detail"]
    assert problem["action"]
    assert answer.headers["content-type"] == "application/problem+json"
    line = (audited(settings) if control else others(settings))[-1]
    assert line["status"] == status
    assert line["path"] == answer.request.url.path
    assert why in str(line["why"])


def test_no_token(settings: ServiceSettings, app: FastAPI) -> None:
    answer = ask(app, "GET", RUNS)
    refused(settings, answer, 401, "no valid token")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_wrong_token(settings: ServiceSettings, app: FastAPI) -> None:
    wrong = token(settings)[:-1] + "?"
    refused(settings, ask(app, "GET", RUNS, headers=bearer(wrong)), 401, "no valid token")
    assert wrong not in other_audit(settings.audit).read_text()


def test_tokens_get_in_and_are_never_logged(settings: ServiceSettings, app: FastAPI) -> None:
    for role in Role:
        assert ask(app, "GET", RUNS, headers=bearer(token(settings, role))).status_code == 200
    ask(app, "POST", CANCEL, headers=bearer(token(settings)))
    ask(app, "POST", "/logout", headers=bearer(token(settings)))
    assert audited(settings)[-1]["caller"] == others(settings)[-1]["caller"] == "control from 127.0.0.1"
    log = settings.audit.read_text() + other_audit(settings.audit).read_text()
    assert not any(value in log for value in open_tokens(settings.tokens).values())


def test_the_read_token_changes_nothing(settings: ServiceSettings, app: FastAPI) -> None:
    answer = ask(app, "POST", CANCEL, headers=bearer(token(settings, Role.READ)))
    refused(settings, answer, 403, "the read token changes nothing")
    assert others(settings)[-1]["caller"] == "read from 127.0.0.1"


def test_sessions(settings: ServiceSettings, app: FastAPI) -> None:
    access, now_s = Access(open_tokens(settings.tokens)), time.time()
    assert ask(app, "GET", RUNS, headers=cookie(access.make_cookie(Role.READ, now_s))).status_code == 200
    expired = access.make_cookie(Role.CONTROL, now_s - SESSION_S - 1)
    refused(settings, ask(app, "GET", RUNS, headers=cookie(expired)), 401, "no valid token or session")
    raised = access.make_cookie(Role.READ, now_s).replace("read", "control")
    refused(settings, ask(app, "GET", RUNS, headers=cookie(raised)), 401, "no valid token or session")
    other = Access({Role.CONTROL: "x" * 32}).make_cookie(Role.CONTROL, now_s)
    refused(settings, ask(app, "GET", RUNS, headers=cookie(other)), 401, "no valid token or session")


@pytest.mark.parametrize("value", ["", ".", "a.b", "control.1.x.y", "é.9.9.9"])
def test_cookies_that_are_none(settings: ServiceSettings, app: FastAPI, value: str) -> None:
    headers = [(b"cookie", f"{COOKIE}={value}".encode("latin-1"))]
    assert ask(app, "GET", RUNS, headers=headers).status_code == 401


def test_foreign_host(settings: ServiceSettings, app: FastAPI) -> None:
    """DNS rebinding: another site's name that points here."""
    answer = ask(app, "GET", RUNS, host="evil.example", headers=bearer(token(settings)))
    refused(settings, answer, 403, "this service is not 'evil.example")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0::0"])
def test_a_service_on_every_address_answers_to_its_names(settings: ServiceSettings, host: str) -> None:
    app = create_app(replace(settings, host=host, hosts=("freshet-service", "2001:db8::7")))
    for name in ("freshet-service", "[2001:db8::7]", "127.0.0.1", "[::1]"):
        assert ask(app, "GET", RUNS, host=name, headers=bearer(token(settings))).status_code == 200
    for name in ("0.0.0.0", "[::]", "10.0.0.7"):
        answer = ask(app, "GET", RUNS, host=name, headers=bearer(token(settings)))
        refused(settings, answer, 403, "this service is not")


def test_cross_site_post(settings: ServiceSettings, app: FastAPI) -> None:
    session = cookie(Access(open_tokens(settings.tokens)).make_cookie(Role.CONTROL, time.time()))
    for header in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = ask(app, "POST", CANCEL, headers=session | header)
        refused(settings, answer, 403, "comes from another site")
    own = session | {"Origin": "http://127.0.0.1:8270", "Sec-Fetch-Site": "same-origin"}
    assert ask(app, "POST", CANCEL, headers=own).status_code == 409  # past the guard: there is no cluster


def test_large_bodies(settings: ServiceSettings, app: FastAPI) -> None:
    big = b" " * (MOST_BODY_BYTES + 1)
    answer = ask(app, "POST", "/api/v1/jobs", headers=bearer(token(settings)), content=big)
    refused(settings, answer, 413, "larger than")

    async def pieces() -> object:
        for _ in range(17):
            yield b" " * (MOST_BODY_BYTES // 16)

    answer = ask(app, "POST", "/api/v1/jobs", headers=bearer(token(settings)), content=pieces())
    refused(settings, answer, 413, "larger than", control=True)


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/runs/..%2F..%2Fetc%2Fpasswd/view",
        "/api/v1/runs/..%2Fgpt/view",
        "/api/v1/runs/%2Fetc/view",
        "/static/..%2F..%2Fpyproject.toml",
        "/static/%2e%2e%2ftokens.json",
    ],
)
def test_path_traversal(settings: ServiceSettings, app: FastAPI, path: str) -> None:
    answer = ask(app, "GET", path, headers=bearer(token(settings)))
    refused(settings, answer, 404, "there is no")
    assert others(settings)[-1]["caller"] == "control from 127.0.0.1"


def test_a_page_that_is_asked_to_leave_its_folder(settings: ServiceSettings, app: FastAPI) -> None:
    """A path that its route takes, but not its check; and one that is encoded twice."""
    for path, status in (("/jobs/%2e%2e/steps", 422), ("/runs/%252e%252e%252fetc", 404)):
        answer = ask(app, "GET", path, headers=bearer(token(settings, Role.READ)))
        line = others(settings)[-1]
        assert (answer.status_code, line["status"], line["path"]) == (status, status, answer.request.url.path)
        assert line["why"]


def test_what_is_merely_not_there_needs_no_line(settings: ServiceSettings, app: FastAPI) -> None:
    before = others(settings)
    for path in ("/api/v1/runs/no-such-run", "/static/other.css", "/nowhere"):
        assert ask(app, "GET", path, headers=bearer(token(settings))).status_code == 404
    assert others(settings) == before


def test_a_control_s_form_is_not_for_the_read_token(settings: ServiceSettings, app: FastAPI) -> None:
    """Its route refuses it, for a request that by itself changes nothing."""
    show(app, live_job())
    answer = ask(app, "GET", "/jobs/gpt/controls/pause", headers=bearer(token(settings, Role.READ)))
    line = others(settings)[-1]
    assert (answer.status_code, line["status"]) == (403, 403)
    assert (line["caller"], line["why"]) == ("read from 127.0.0.1", "the read token changes nothing")


def test_log_in_and_out(settings: ServiceSettings, app: FastAPI) -> None:
    page = ask(app, "GET", "/", headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["location"]) == (303, "/login?next=/")
    wrong = ask(app, "POST", "/login", data={"token": "no such token"})
    assert wrong.status_code == 401
    assert "There is no such token." in wrong.text
    assert others(settings)[-1]["status"] == 401
    assert others(settings)[-1]["why"] == "there is no such token"
    right = ask(app, "POST", "/login", data={"token": token(settings), "next": "//evil.example"})
    assert (right.status_code, right.headers["location"]) == (303, "/")
    made = right.headers["set-cookie"]
    assert "HttpOnly" in made
    assert "SameSite=strict" in made
    assert "Secure" not in made
    value = made.partition("=")[2].partition(";")[0]
    assert ask(app, "GET", "/", headers=cookie(value)).status_code == 200
    out = ask(app, "POST", "/logout", headers=cookie(value))
    assert 'freshet_session=""' in out.headers["set-cookie"]


def test_a_session_behind_a_proxy_that_ends_tls_is_for_tls_alone(
    settings: ServiceSettings, app: FastAPI
) -> None:
    login = {"token": token(settings)}
    answer = ask(app, "POST", "/login", data=login, headers={"Origin": "https://127.0.0.1:8270"})
    assert "Secure" in answer.headers["set-cookie"]
    answer = ask(app, "POST", "/login", data=login, headers={"Origin": "http://127.0.0.1:8270"})
    assert "Secure" not in answer.headers["set-cookie"]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of the limits: on a slow machine a request ages out while the next ones are asked."""
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: 0.0, time=time.time))


@pytest.mark.usefixtures("stopped")
def test_logins_and_controls_are_limited(settings: ServiceSettings, app: FastAPI) -> None:
    answers = [ask(app, "POST", "/login", data={"token": str(n)}) for n in range(12)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    refused(settings, answers[-1], 429, "too many requests from 127.0.0.1")
    assert int(answers[-1].headers["retry-after"]) >= 1
    answers = [ask(app, "POST", CANCEL, headers=bearer(token(settings))) for _ in range(60)]
    assert [answer.status_code for answer in answers] == [409] * 30 + [429] * 30
    # Less than a second to wait.
    assert answers[-1].headers["retry-after"] == "1"


@pytest.mark.usefixtures("stopped")
def test_a_reader_is_limited_before_it_is_refused_and_takes_no_control_away(
    settings: ServiceSettings, app: FastAPI
) -> None:
    reader = bearer(token(settings, Role.READ))
    answers = [ask(app, "POST", CANCEL, headers=reader) for _ in range(32)]
    assert [answer.status_code for answer in answers] == [403] * 30 + [429] * 2
    assert ask(app, "POST", CANCEL, headers=bearer(token(settings))).status_code == 409


def test_mistakes_are_answered_and_audited(
    settings: ServiceSettings, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(job: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app.state.services.live, "find", fails)
    answer = ask(app, "GET", "/api/v1/jobs/gpt", headers=bearer(token(settings)))
    assert answer.status_code == 500
    assert "the service made a mistake" in answer.json()["detail"]
    assert (others(settings)[-1]["status"], others(settings)[-1]["why"]) == (500, "ZeroDivisionError")
    assert answer.headers["content-security-policy"] == POLICY


def test_a_body_that_is_cut_off_controls_nothing(settings: ServiceSettings, app: FastAPI) -> None:
    """The sender is gone after half of the body."""
    sent: list[object] = []
    messages = [
        {"type": "http.request", "body": b'{"abort"', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    async def send(message: object) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token(settings)}".encode())]
    scope = {"type": "http", "method": "POST", "path": CANCEL, "headers": headers, "client": ("127.0.0.1", 1)}
    asyncio.run(app(scope, receive, send))  # pyright: ignore[reportArgumentType]
    assert sent == []
    assert audited(settings)[-1]["why"] == "the sender was gone before all of it had arrived"


def test_strangers_cannot_flood_the_audit_log(settings: ServiceSettings, app: FastAPI) -> None:
    ask(app, "GET", RUNS)
    before = other_audit(settings.audit).stat().st_size
    for _ in range(150):
        ask(app, "GET", RUNS, host="x" * 20_000)
    assert other_audit(settings.audit).stat().st_size - before < 130 * 1_000


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CANCEL),
        ("POST", "/logout"),
        ("GET", "/static/%2e%2e%2ftokens.json"),
        ("GET", "/jobs/a/what-if"),
    ],
)
def test_a_reader_cannot_flood_the_audit_log(
    settings: ServiceSettings, app: FastAPI, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of refusals, the role's and the limits', and of logouts."""
    monkeypatch.setattr(audit, "OTHERS_PER_S", 1e-6)
    app, reader = create_app(settings), bearer(token(settings, Role.READ))
    before = len(others(settings))
    for _ in range(audit.OTHERS_AT_ONCE + 20):
        ask(app, method, path, headers=reader)
    assert len(others(settings)) - before <= audit.OTHERS_AT_ONCE
    # Another caller's refusals have lines of their own.
    ask(app, "POST", "/logout", headers=bearer(token(settings)))
    assert others(settings)[-1]["caller"] == "control from 127.0.0.1"


def test_nothing_that_is_refused_pushes_a_control_out(
    settings: ServiceSettings, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(app, "POST", CANCEL, headers=bearer(token(settings)))
    control = audited(settings)[-1]
    monkeypatch.setattr(audit, "MOST_BYTES", 500)
    for _ in range(30):
        ask(app, "POST", CANCEL, headers=bearer(token(settings, Role.READ)))
    set_aside = other_audit(settings.audit).with_name(other_audit(settings.audit).name + ".1")
    assert set_aside.exists()
    assert audited(settings)[-1] == control
    assert {settings.audit, other_audit(settings.audit), set_aside} < {*settings.own_files}


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("method", SIMULATIONS)
def test_simulations_are_limited(settings: ServiceSettings, app: FastAPI, method: str) -> None:
    reader = bearer(token(settings, Role.READ))
    ends = itertools.islice(itertools.cycle(SIMULATIONS[method]), 12)
    answers = [ask(app, method, f"/jobs/gpt{end}", headers=reader) for end in ends]
    assert [answer.status_code == 429 for answer in answers] == [False] * 10 + [True] * 2


def test_the_pages_of_controls_that_simulate_are_limited() -> None:
    simulate = {f"/controls/{name}" for name, control in CONTROLS.items() if control.command.simulates()}
    assert {end for end in SIMULATIONS["GET"] if end.startswith("/controls/")} == simulate


def test_every_answer_has_the_security_headers(settings: ServiceSettings, app: FastAPI) -> None:
    for path in ("/login", "/healthz", RUNS, "/nowhere"):
        answer = ask(app, "GET", path)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in POLICY


def test_the_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    from orchestrator.client.errors import JobError

    path = tmp_path / "new" / "tokens.json"
    made = open_tokens(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert open_tokens(path) == made
    assert len(set(made.values())) == len(Role)
    path.chmod(0o644)
    with pytest.raises(JobError, match=r"others may read the token file .*: chmod 600"):
        open_tokens(path)
    path.chmod(0o600)
    path.write_text('{"control": "short"}')
    with pytest.raises(JobError, match="fewer than 16 characters"):
        open_tokens(path)
    path.write_text('{"read": "0123456789abcdef"}')
    with pytest.raises(JobError, match="no control token; remove it"):
        open_tokens(path)
    path.write_text("{")
    with pytest.raises(JobError, match="is no token file"):
        open_tokens(path)


def test_the_audit_log_is_its_owners_alone(settings: ServiceSettings, app: FastAPI) -> None:
    ask(app, "GET", RUNS)
    ask(app, "POST", CANCEL, headers=bearer(token(settings)))
    for file in (settings.audit, other_audit(settings.audit)):
        assert file.stat().st_mode & 0o777 == 0o600
