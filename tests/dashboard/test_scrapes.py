"""What `/metrics` tells of live jobs, and what a scrape costs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import synthetic_run
from fastapi.testclient import TestClient
from serving import Made, settings_in, show, token

from dashboard.api.metrics import TOLD_S
from dashboard.app import create_app
from dashboard.service.access import Role
from orchestrator.events.types import Finished
from orchestrator.history.job_view import JobView


class Copied(Made):
    """A job that knows whether it was copied."""

    copied = False

    def snapshot(self) -> JobView:
        self.copied = True
        return super().snapshot()


def job(name: str, ended_s: float | None = None) -> Copied:
    """A job that trains, or ended at `ended_s`."""
    made = Copied(name)
    for record in synthetic_run.records(steps=20):
        if ended_s is not None or not isinstance(record.event, Finished):
            made.view.fold(record)
    made.view.job = name
    if ended_s is not None:
        made.view.last_s = ended_s
    return made


def test_a_scrape_copies_only_the_jobs_that_it_tells_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 2e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    jobs = [job("trains"), job("ended", now_s - TOLD_S + 1), job("ended-before", now_s - TOLD_S - 1)]
    settings = settings_in(tmp_path)
    app = create_app(settings)
    show(app, jobs[0])
    app.state.services.live.jobs = lambda: jobs
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        text = client.get("/metrics").text
    assert set(re.findall(r'^freshet_step{job="(.*)"}', text, re.MULTILINE)) == {"trains", "ended"}
    assert [each.copied for each in jobs] == [True, True, False]
