"""Requests to a Freshet service: the token, new tries, and a typed error for each answer that is one."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import httpx

from orchestrator.client.access_token import TOKEN, TOKEN_FILE, checked_url, find_credentials
from orchestrator.client.errors import (
    PROBLEMS,
    ControllerSilent,
    PlanChanged,
    Refused,
    ServiceError,
    ServiceUnreachable,
)

API = "/api/v1"
TRIES = 3
"""Attempts to reach the service, which may be restarting."""
RETRY_S = 0.4
CONNECT_S = 5.0
ANSWER_S = 100.0
"""Limit for an answer: longer than the service waits for a job's controller, `asking.ANSWER_S`."""
BY_STATUS = {409: Refused, 503: ControllerSilent}
"""For answers that do not say their type."""


class RestTransport:
    """Sends requests to the service at `address`.

    Args:
        environment: has the token, or the file that has it.
        home: the folder with the file that is looked for otherwise, for a service on this machine.

    Raises:
        JobError: the address is none, the token must not be sent there, or its file cannot be used.
    """

    def __init__(self, address: str, environment: Mapping[str, str], home: Path) -> None:
        self.address = checked_url(address, environment)
        self._credentials = find_credentials(self.address, environment, home)
        self._secure = self.address.lower().startswith("https:")
        self._verify: ssl.SSLContext | bool = httpx.create_ssl_context() if self._secure else False

    async def get(self, path: str, **query: float) -> httpx.Response:
        """Read `path`. With `wait_s` in `query`, the service may hold the request for so long."""
        return await self._request("GET", path, {}, query, None, again=True)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        again: bool,
        **query: float,
    ) -> httpx.Response:
        """Send `body`.

        Args:
            again: whether it may be sent again if its answer is lost.
        """
        return await self._request("POST", path, headers or {}, query, body, again=again)

    async def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        query: Mapping[str, float],
        body: Mapping[str, Any] | None,
        *,
        again: bool,
    ) -> httpx.Response:
        """Raises:
        ServiceUnreachable: nobody answers, or no Freshet service.
        JobError: the answer is an error.
        """
        started_s = time.monotonic()
        sent = {**headers, **self._authorization()}
        for attempt in range(1, TRIES + 1):
            try:
                # A client of its own, because a blocking caller has another event loop each time. Through no proxy
                # where the token is in the clear.
                async with httpx.AsyncClient(
                    verify=self._verify,
                    trust_env=self._secure,
                    follow_redirects=False,
                    timeout=httpx.Timeout(ANSWER_S + query.get("wait_s", 0.0), connect=CONNECT_S),
                ) as client:
                    url = f"{self.address}{API}{path}"
                    answer = await client.request(method, url, headers=sent, params=query, json=body)
            except httpx.TransportError as error:
                lost = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if attempt < TRIES and (again or not lost) and not _is_certificate(error):
                    await asyncio.sleep(RETRY_S * attempt)
                    continue
                # Without its cause, which holds the request with the token.
                raise self._unreachable(error, attempt, time.monotonic() - started_s) from None
            if answer.is_success:
                return answer
            self._refuse(answer)
        raise AssertionError

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._credentials.token}"} if self._credentials.token else {}

    def _unreachable(self, error: httpx.TransportError, tries: int, seconds: float) -> ServiceUnreachable:
        reason = str(error).strip() or type(error).__name__
        if _is_certificate(error):
            return ServiceUnreachable(
                f"the certificate of {self.address} is not trusted ({reason}): name its authority's file in"
                " SSL_CERT_FILE"
            )
        tried = f"tried {'once' if tries == 1 else f'{tries} times'} in {seconds:.1f} s"
        return ServiceUnreachable(
            f"no Freshet service answers at {self.address} ({reason}; {tried}): start one with `freshet dashboard`, or"
            " see that host and port are right"
        )

    def _refuse(self, answer: httpx.Response) -> NoReturn:
        """Raises:
        JobError: what `answer`, which is an error, says.
        """
        if answer.is_redirect:
            raise ServiceUnreachable(
                f"{self.address} redirects to {answer.headers.get('Location', 'nowhere')}, where no token is sent: use"
                " that address if it is the service's"
            )
        problem = _problem(answer)
        if problem is None:
            raise ServiceUnreachable(
                f"{self.address} is no Freshet service: it answers {answer.status_code}"
                f" {answer.headers.get('Content-Type', '')}; `freshet dashboard` starts one, on port 8270 by default"
            )
        detail, status = str(problem.get("detail", answer.reason_phrase)), answer.status_code
        kind = PROBLEMS.get(str(problem.get("type")), BY_STATUS.get(status))
        if kind is PlanChanged:
            epoch, _, version = str(problem.get("version", "0.0")).partition(".")
            raise PlanChanged(detail, int(epoch), int(version))
        if kind is not None:
            raise kind(detail)
        raise ServiceError(f"{detail}{self._hint(status, answer, problem)}", status)

    def _hint(self, status: int, answer: httpx.Response, problem: Mapping[str, Any]) -> str:
        if status == 401:
            had = (
                f"; that of {self._credentials.source} is not valid there" if self._credentials.token else ""
            )
            return f" at {self.address}{had}: set {TOKEN}, or {TOKEN_FILE} to the service's token file"
        if status == 403:
            return f" (the token of {self._credentials.source}): use the control token"
        if status == 429:
            return f": ask again in {answer.headers.get('Retry-After', 'a few')} seconds"
        if status == 422:
            return ""
        return f". {problem['action']}" if problem.get("action") else ""


def _problem(answer: httpx.Response) -> dict[str, Any] | None:
    """The problem that `answer` tells of; None if it is not a service of ours that answers."""
    if not answer.headers.get("Content-Type", "").startswith("application/problem+json"):
        return None
    try:
        problem = answer.json()
    except ValueError:
        return None
    return problem if isinstance(problem, dict) else None


def _is_certificate(error: Exception) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def json_of(answer: httpx.Response, address: str) -> dict[str, Any]:
    """The object in `answer`.

    Raises:
        ServiceUnreachable: it is none: another service answers at `address`.
    """
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServiceUnreachable(
            f"{address} is no Freshet service: its answer is no JSON object; `freshet dashboard` starts one, on port"
            " 8270 by default"
        )
    return found
