"""The pages as a browser shows them: from a file, with no network, with no message on the console."""

from __future__ import annotations

import re
from pathlib import Path

from chromium import needs_chromium, open_page
from elastic_run import eventful, life, rehearse
from report_page import Page
from synthetic_run import freezing_records

from benchmarks.parts.sweep_page import Outcome, write_page
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from orchestrator.report.step_timeline import newest_step

HOSTILE = "<script>alert(1)</script>"


def hostile_run() -> JobView:
    run = fold(freezing_records())
    run.job = run.spec["job"]["name"] = HOSTILE
    return run


def rehearsal() -> JobView:
    run = eventful()
    rehearse(run, (life(0, 990, 1004.5), life(1, 990), life(2, 1007)), began_s=1001, ended_s=1022.4)
    return fold(run.records)


@needs_chromium
def test_the_report_draws_its_charts_and_runs_no_script_of_a_job_s_name(tmp_path: Path) -> None:
    html = render(hostile_run())
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert opened.console == []
    assert len(opened.canvases) == len(Page(html).charts) == 10
    assert all(width > 300 and height == 250 for width, height in opened.canvases)
    assert opened.dom.count('class="card chart drawn"') == 10
    assert "&lt;script&gt;alert(1)&lt;/script&gt; · Freshet report</title>" in opened.dom
    # uPlot's legend names every curve, and the steps.
    assert {"step", "training", "validation", "planned", "p_eff"} <= set(
        re.findall(r'class="u-label">([^<]*)<', opened.dom)
    )


@needs_chromium
def test_a_rehearsal_on_a_phone(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(render(rehearsal()), encoding="utf-8")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile", "--window-size=500,900")
    assert opened.console == []
    assert len(opened.canvases) == 6
    assert all(0 < width < 500 for width, _ in opened.canvases)


@needs_chromium
def test_pages_of_pictures_and_of_the_sweep(tmp_path: Path) -> None:
    step = newest_step(fold(freezing_records()))
    assert step is not None
    (tmp_path / "step.html").write_text(step.page(), encoding="utf-8")
    opened = open_page(tmp_path / "step.html", tmp_path / "profile")
    assert (opened.console, opened.dom.count("<svg")) == ([], 1)
    outcomes = [
        Outcome(
            method=method,
            control=HOSTILE,
            relative_throughput=1.0 + ratio,
            validation_loss=2.0,
            freeze_ratio=ratio,
            p_eff=0.5,
        )
        for method in ("none", "apf")
        for ratio in (0.1, 0.2)
    ]
    write_page(tmp_path / "sweep.html", outcomes, steps=10, job=HOSTILE)
    opened = open_page(tmp_path / "sweep.html", tmp_path / "profile")
    assert opened.console == []
    assert [height for _, height in opened.canvases] == [460]
