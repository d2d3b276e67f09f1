"""The pages as a browser shows them: from a file, without network, with no message on the console."""

from __future__ import annotations

import re
from pathlib import Path

from chromium import needs_chromium, open_page
from elastic_run import eventful, life, rehearse
from report_page import Page
from synthetic_run import STEPS, freezing_records

from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from orchestrator.report.step.step_timeline import measured_step
from orchestrator.sweep.grid import Cell
from orchestrator.sweep.outcomes import SweptJob
from orchestrator.sweep.page import page_of

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
    assert opened.dom.count('class="card timeline-view drawn"') == 1
    assert all(width > 300 and height == 250 for width, height in opened.canvases)
    assert opened.dom.count('class="card chart drawn"') == 10
    assert "&lt;script&gt;alert(1)&lt;/script&gt; · Freshet report</title>" in opened.dom
    # uPlot's legend names every curve and the steps.
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
    step = measured_step(fold(freezing_records()))
    assert step is not None
    (tmp_path / "step.html").write_text(step.page(), encoding="utf-8")
    opened = open_page(tmp_path / "step.html", tmp_path / "profile")
    assert (opened.console, opened.dom.count('class="card timeline-view drawn"')) == ([], 1)
    swept = [
        SweptJob(
            cell=Cell(settings=(("freeze.method", method), ("job.name", HOSTILE + str(step_s)))),
            numbers={"step_s": step_s, "per_s": 1 / step_s, "loss": 2.0},
            frozen_by=method,
        )
        for method in ("none", "apf")
        for step_s in (0.1, 0.2)
    ]
    (tmp_path / "sweep.html").write_text(page_of("a sweep", HOSTILE, swept), encoding="utf-8")
    opened = open_page(tmp_path / "sweep.html", tmp_path / "profile")
    assert opened.console == []
    assert [height for _, height in opened.canvases] == [460]


DRIVE = """<script>
const figure = document.querySelector("figure.chart");
const chart = JSON.parse(figure.querySelector("script").text);
chart.series[0].name = "newer data";
freshetCharts.draw(figure, chart);
figure.querySelector(".plot").style.width = "400px";
dispatchEvent(new Event("resize"));
setTimeout(() => {
  const over = figure.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  const at = { clientX: box.left + box.width - 1, clientY: box.top + 20, bubbles: true };
  over.dispatchEvent(new MouseEvent("mouseenter", at));
  over.dispatchEvent(new MouseEvent("mousemove", at));
}, 100);
</script></body>"""


@needs_chromium
def test_a_chart_takes_new_data_and_widths_and_reads_values_out_under_the_pointer(tmp_path: Path) -> None:
    run = fold(freezing_records())
    html = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", render(run)).replace(
        "</body>", DRIVE
    )
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert opened.console == []
    assert len(opened.canvases) == 10
    assert opened.canvases[0][0] == 400
    loss = opened.dom[opened.dom.index('class="u-legend') :].split("</table>")[0]
    (axis, step), curve, *_ = re.findall(r'u-label">([^<]*)<.*?u-value">([^<]*)<', loss)
    assert axis == "step"
    assert STEPS - 5 < int(step) <= STEPS
    assert curve == ("newer data", f"{run.steps[int(step)].loss:.4g}")
