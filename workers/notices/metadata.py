"""One HTTP request to a cloud's metadata service: no proxy, no redirect, short timeout, bounded answer."""

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
"""Most bytes of an answer."""
TIMEOUT_S = 2.0
"""Timeout of each read from the service, which runs on the same host."""


@dataclass(frozen=True, kw_only=True)
class MetadataAnswer:
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
) -> MetadataAnswer:
    """The answer of `base`, an http address, to a request for `path`, with any status.

    Raises:
        NoticeError: no answer arrives in time, it is not HTTP, or it is too long.
    """
    address = urlsplit(base)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(LIMIT_BYTES + 1)
    # A ValueError: an earlier answer, such as a token, is not a valid header value.
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeError(f"{base} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if len(body) > LIMIT_BYTES:
        raise NoticeError(f"{base}{path} answered more than {LIMIT_BYTES} bytes")
    return MetadataAnswer(
        status=response.status, headers=response.headers, body=body.decode(errors="replace")
    )


def refusal(base: str, path: str, answer: MetadataAnswer) -> NoticeError:
    """The error to raise for an unexpected status."""
    return NoticeError(f"{base}{path} answered with status {answer.status}")
