"""The operations of a sample are counted beside a job that has started, and logged once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bare_controller import controller_of, told
from pace import patient
from tiny_jobs import tiny

from orchestrator.client import submit
from orchestrator.client.submit import _Counting
from orchestrator.events.types import FlopsCounted
from orchestrator.prepare.settling import opened
from orchestrator.spec.rules import check

WIDTH, CONTEXT, LAYERS, VOCABULARY = 16, 16, 4, 256
EXPECTED = (
    3 * CONTEXT * (2 * (LAYERS * 12 * WIDTH * WIDTH + WIDTH * VOCABULARY) + LAYERS * 4 * CONTEXT * WIDTH)
)


class Heard:
    """A controller that hears of a count."""

    def __init__(self) -> None:
        self.counts: list[float] = []
        self.learn = SimpleNamespace(remote=self.counts.append)


def counting(folder: Path, heard: Heard) -> _Counting:
    spec, _ = opened(check(tiny(folder, "counted", pipeline={"ranks": 1})))
    return _Counting(spec, heard)


def test_the_controller_is_told_of_the_count(tmp_path: Path) -> None:
    heard = Heard()
    thread = counting(tmp_path, heard)
    thread.start()
    thread.join(patient(60))
    assert heard.counts == [pytest.approx(EXPECTED)]


def test_a_driver_that_ends_waits_for_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, imported = Heard(), threading.Event()
    monkeypatch.setattr(submit, "import_compiler", lambda: imported.wait(patient(60)))
    thread = counting(tmp_path, heard)
    thread.start()
    thread.give_up()
    imported.set()
    thread.join(patient(60))
    assert heard.counts == []


def test_a_count_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):

            def counts() -> list[Any]:
                return [event for event in told(controller) if isinstance(event, FlopsCounted)]

            await controller.learn(2e9)
            assert counts() == [FlopsCounted(flops_per_sample=2e9)]
            controller._record(FlopsCounted(flops_per_sample=2e9))
            assert controller._view.flops_per_sample == 2e9
            await controller.learn(2e9)
            assert counts() == []

    asyncio.run(run())
