"""AWS: the notice two minutes before a spot instance is interrupted, and the earlier advice to leave it.

EC2 user guide, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations": both are
items of the instance metadata that answer 404 while there is no notice. Uses only version 2 of the service,
with a session token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from workers.notices.metadata import MetadataAnswer, ask, refusal
from workers.notices.notice import Notice, NoticeError

BASE = "http://169.254.169.254"
TOKEN = "/latest/api/token"
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_LIFE_S = 21_600


class Aws:
    """The metadata service of an EC2 instance.

    Args:
        base: its address.
        now: seconds since the Unix epoch.
    """

    name = "aws"
    every_s = 2.0
    of_node = True

    def __init__(self, base: str = BASE, now: Callable[[], float] = time.time) -> None:
        self._base = base
        self._now = now
        self._token: str | None = None

    def look(self) -> tuple[Notice, ...]:
        """An interruption, and a recommendation to leave.

        Raises:
            NoticeError: the service does not answer as documented.
        """
        notices: list[Notice] = []
        if (interruption := self._item(INTERRUPTION)) is not None:
            action, at = _field(interruption, "action"), _field(interruption, "time")
            notices.append(self._notice(f"spot interruption: {action} at {at}", _seconds(at)))
        if (advice := self._item(REBALANCE)) is not None:
            # It says when the advice was given, not when the instance is interrupted.
            notices.append(self._notice(f"rebalance recommended at {_field(advice, 'noticeTime')}", None))
        return tuple(notices)

    def _notice(self, text: str, deadline_s: float | None) -> Notice:
        left_s = None if deadline_s is None else max(0.0, deadline_s - self._now())
        return Notice(source=self.name, left_s=left_s, text=text)

    def _item(self, path: str) -> dict[str, Any] | None:
        answer = self._get(path)
        if answer.status == 401:
            # The token expired, or the instance was moved with its memory: try once more with a fresh token.
            self._token = None
            answer = self._get(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise refusal(self._base, path, answer)
        return answer.json()

    def _get(self, path: str) -> MetadataAnswer:
        if self._token is None:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            answer = ask(self._base, TOKEN, life, method="PUT")
            if answer.status != 200:
                raise refusal(self._base, TOKEN, answer)
            self._token = answer.body.strip()
        return ask(self._base, path, {"X-aws-ec2-metadata-token": self._token})


def _field(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise NoticeError(f"it answered without a text {name!r}: {str(item)[:80]}")
    return value


def _seconds(at: str) -> float:
    """Seconds since the Unix epoch of a time such as `2017-09-18T08:22:00Z`."""
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise NoticeError(f"its answer has {at[:40]!r} where a time is expected") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
