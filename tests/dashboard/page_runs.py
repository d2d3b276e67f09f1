"""Runs for the tests of pages: past runs with a profile beside them, and views of live jobs, made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import elastic_run
from made_profile import made_profile
from serving import settings_in, write_run
from synthetic_run import plan, records

from dashboard.service.settings import ServiceSettings
from orchestrator.events.types import Event, Finished, Issued, Record
from orchestrator.history.job_view import JobView, fold
from planner.plan import Plan
from planner.profile import Profile

HOSTILE = "<script>alert(1)</script>"


def profile() -> Profile:
    """Of the model of `synthetic_run`; its last layer is twice as slow as the others."""
    names = [f"layer{number}" for number in range(10)]
    return made_profile(names, [100_000] * 10, 4, weights=[1.0] * 9 + [2.0], memory_bytes=12_000_000)


def page_settings(folder: Path) -> ServiceSettings:
    """A service that shows `gpt`, `frozen`, a `rehearsal`, and `half`, which has no log yet."""
    settings = settings_in(folder)
    run = elastic_run.eventful()
    lives = (elastic_run.life(0, 990, 1004.5), elastic_run.life(1, 990), elastic_run.life(2, 1007))
    elastic_run.rehearse(run, lives, began_s=1001, ended_s=1022.4)
    (runs,) = settings.runs
    write_run(runs / "rehearsal", run.records)
    write_run(runs / "long", records(steps=5_000))
    for name in ("gpt", "frozen", "long"):
        (runs / name / "profile.json").write_text(profile().to_json())
    return settings


def other_plan() -> Plan:
    """Layer 3 moves from rank 1 to rank 0."""
    return replace(plan(), version=2, reason="layer 3 moves", layers=((0, 4), (4, 5), (5, 7), (7, 10)))


def training(*events: Event) -> JobView:
    """The view of a job that trains, after `events`."""
    log = [record for record in records(steps=40) if not isinstance(record.event, Finished)]
    return fold([*log, *(Record(time_s=log[-1].time_s + 1, event=event) for event in events)])


def moving() -> JobView:
    """The view of a job that has been sent a plan with which layer 3 changes ranks."""
    return training(Issued(plan=other_plan()))
