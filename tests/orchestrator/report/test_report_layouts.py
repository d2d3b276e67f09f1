"""Freezing in the report and on a job's page where layers are frozen from the input up: pipelines, prefix, what is
kept, what each change cost and brought."""

from __future__ import annotations

import pytest
from packed_run import FROZEN_AT, PACKED_AT, STEPS, WEIGHED, packed_records
from report_page import Page
from synthetic_run import freezing_records

from dashboard.pages.sections import BY_NAME
from dashboard.pages.sections import render as render_section
from dashboard.pages.shown import Shown
from orchestrator.events.types import LayoutWeighed, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.page import render
from orchestrator.report.run.layouts import layouts
from workers.protocol.reports import ActivationsUsed, PrefixFrozen


def job_page(run: JobView) -> str:
    shown = Shown(view=run, name="packed", base="/jobs/packed", live=True, lost=False, trouble="", folder="")
    return str(render_section(BY_NAME["freezing"], shown))


def test_each_stretch_of_steps_has_its_layout_its_speed_its_pause_and_what_was_found() -> None:
    run = fold(packed_records())
    table = layouts(run)[0][0]
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [row["From step"] for row in rows] == ["1", str(FROZEN_AT), str(PACKED_AT)]
    assert [row["Frozen layers"] for row in rows] == ["0", "6", "6"]
    assert [row["Pipelines"] for row in rows] == ["1 x 4 ranks", "1 x 4 ranks", "2 x 2 ranks"]
    assert [row["Replicas"] for row in rows] == ["2", "2", "2"]
    assert [row["Step, median"] for row in rows] == ["400 ms", "250 ms", "100 ms"]
    assert [row["Times as fast"] for row in rows] == ["1.00", "1.60", "4.00"]
    assert [row["Pause before"] for row in rows] == ["–", "–", "100 ms"]
    assert [row["Found kept"] for row in rows] == ["–", "0 of 80", "200 of 240"]


@pytest.mark.parametrize("shown", [render, job_page])
def test_report_and_job_page_show_prefix_pipelines_and_what_was_weighed(shown: object) -> None:
    assert callable(shown)
    run = fold(packed_records())
    text = shown(run)
    page = Page(text)
    assert {"Pipelines", "Frozen prefix"} <= set(page.charts)
    assert [each["name"] for each in page.charts["Pipelines"]["series"]] == ["pipelines", "ranks of each"]
    (prefix,) = page.charts["Frozen prefix"]["series"]
    told = dict(zip(prefix["x"], prefix["y"], strict=True))
    assert (told[FROZEN_AT - 1], told[FROZEN_AT]) == (0, 6)
    for words in ("layers that go forward only, since step 21", "200 of 240", "2 x 2 ranks", WEIGHED.reason):
        assert words in page.text, words


def test_why_nothing_is_kept_stands_on_the_page() -> None:
    run = fold(packed_records(why_not="layer block2 draws (dropout)"))
    assert "what 6 frozen layers make of samples is not kept: layer block2 draws (dropout)" in render(run)
    assert "is not kept" not in render(fold(packed_records()))


def test_all_steps_count_of_what_was_found_but_those_that_are_run_again() -> None:
    """However many reports there are, and however long ago."""
    log, many = packed_records(), 2_000
    used = [
        ActivationsUsed(step=STEPS + step, rank=0, layers=6, hits=1, partly=0, misses=0, bytes=1)
        for step in range(1, many)
    ]
    run = fold([*log, *(Record(time_s=log[-1].time_s, event=each) for each in used)])
    assert sum(each.found for each in run.freeze.used.values()) == 200 + many - 1
    run.freeze.take_back(STEPS)
    assert sum(each.found for each in run.freeze.used.values()) == 200
    run.freeze.take_back(PACKED_AT)
    assert [(each.found, each.passed) for each in run.freeze.used.values()] == [(0, 80)]


def test_layouts_that_were_weighed_stand_on_the_page_taken_or_not() -> None:
    frozen = PrefixFrozen(step=3, layers=2, bound=2.0, norms=(), names=("embed", "block0"), tied=())
    taken = LayoutWeighed(prefix=3, pays=True, reason="as 2 pipelines a step takes 53 ms instead of 102 ms")
    left = LayoutWeighed(prefix=5, pays=False, reason="a step takes 50 ms instead of 53 ms")
    told = [Record(time_s=1.0, event=event) for event in (frozen, taken, left)]
    log = freezing_records()
    run = fold([*log, *told])
    (table,) = (each for each in layouts(run)[0] if "weighed" in each.label)
    assert table.rows == (("3", "yes", taken.reason), ("5", "no", left.reason))
    assert left.reason in render(run)
    run.freeze.take_back(3)
    assert run.freeze.weighed == [taken], "the step that the other one was weighed for runs again"
    assert not fold([*log, *told, *freezing_records()[:1]]).freeze.weighed, "a start from new weights"
