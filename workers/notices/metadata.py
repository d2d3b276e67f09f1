"""One HTTP request to a cloud's metadata service: no proxy, no redirect, little time, little to read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from workers.notices.notice import NoticeError

LIMIT_BYTES = 64 * 1024
"""No answer is longer."""
TIMEOUT_S = 2.0
"""How long the service, which is in the same machine, may take for each read."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of the service."""

    status: int
    headers: Message
    body: str

    def json(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            NoticeError: the body is not a JSON object.
        """
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise NoticeError(f"its answer is not a JSON object: {self.body[:80]!r}")
        return value


def ask(
    base: str, path: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = TIMEOUT_S
) -> Answer:
    """What `base`, an http address, answers to a request of `path`, whatever the status.

    Raises:
        NoticeError: nothing answers in time, or what answers speaks no HTTP or says too much.
    """
    address = urlsplit(base)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(LIMIT_BYTES + 1)
    # A ValueError: what was answered before is no header now.
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeError(f"{base} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if len(body) > LIMIT_BYTES:
        raise NoticeError(f"{base}{path} answered more than {LIMIT_BYTES} bytes")
    return Answer(status=response.status, headers=response.headers, body=body.decode(errors="replace"))


def refusal(base: str, path: str, answer: Answer) -> NoticeError:
    """The error to raise for a status that has no meaning."""
    return NoticeError(f"{base}{path} answered with status {answer.status}")
