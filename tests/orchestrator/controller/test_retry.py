"""What a controller retries, for how long, and what it reports meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from pace import patient

from orchestrator.controller.log_writer import Publisher
from orchestrator.controller.retry import persist
from orchestrator.events.log import DamagedLogError


def attempts(*errors: Exception | None, for_s: float) -> tuple[str | None, list[str], int]:
    """Persist through `errors`, the last of which repeats; returns (conclusion, messages, attempts)."""
    left, said, made = [*errors], list[str](), 0

    async def attempt() -> None:
        nonlocal made
        made += 1
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error

    async def bounded() -> str | None:
        async with asyncio.timeout(patient(10.0)):
            return await persist(attempt, said.append, for_s=for_s, every_s=0.001, hopeless=DamagedLogError)

    why = asyncio.run(bounded())
    return why, said, made


def test_trouble_is_said_until_it_is_over() -> None:
    why, said, made = attempts(OSError("held"), OSError("held"), None, for_s=60)
    assert (why, made) == (None, 3)
    assert said == ["OSError: held", "OSError: held", ""]


def test_attempts_end_after_the_time_that_they_have() -> None:
    why, said, made = attempts(OSError("held"), for_s=0.05)
    assert why == "OSError: held" == said[-1]
    assert made > 1


def test_what_is_hopeless_is_tried_once() -> None:
    assert attempts(DamagedLogError("line 3 is no event"), for_s=60) == (
        "line 3 is no event",
        ["line 3 is no event"],
        1,
    )


def test_a_copy_that_fails_is_warned_of_once_per_outage() -> None:
    warned: list[str] = []
    outcomes = [OSError("full"), OSError("full"), None, OSError("gone")]

    def publish() -> None:
        if not outcomes:
            raise SystemExit
        if (error := outcomes.pop(0)) is not None:
            raise error

    with pytest.raises(SystemExit):
        asyncio.run(Publisher(publish, warned.append).keep_publishing(0.001))
    assert [text.rpartition(": ")[2] for text in warned] == ["full", "gone"]
    assert warned[0].startswith("the event log cannot be copied to the job's folder, and is tried again")
