from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from report_page import Page, tokens
from synthetic_run import MICROBATCHES, RANKS, STEPS, plan, records, spec, step_report

from orchestrator.events.log import EventLog
from orchestrator.events.types import (
    Failed,
    Finished,
    Formed,
    Issued,
    RankFailed,
    Record,
    Requested,
    Skipped,
    Submitted,
)
from orchestrator.history.job_view import JobView, fold
from orchestrator.pictures import charts
from orchestrator.pictures.charts import Bin, Chart, Series, ValueAxis, of_times
from orchestrator.quantities import significant
from orchestrator.report.page import render, write_report
from orchestrator.report.run.sections import training
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import (
    ActionSpan,
    CheckpointReport,
    SampleReport,
    TimelineReport,
    ValidationReport,
)

HOSTILE = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)> & \"quotes\" 'single'"


@pytest.fixture(scope="module")
def page() -> str:
    return render(fold(records()))


def with_event(*events: object) -> JobView:
    """A run of 40 steps with `events` at the end."""
    run = fold(records(steps=40)[:-1])
    for event in events:
        run.fold(Record(time_s=run.last_s + 1, event=event))  # pyright: ignore
    return run


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    parsed = Page(page)
    for _, attributes in parsed.elements:
        assert not {"src", "srcset", "action"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")  # a room of the page
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    assert not parsed.all("link")
    for reference in ("url(", "@import", "@font-face", "http"):
        assert not any(reference in style for style in parsed.styles), reference


def test_the_security_policy_allows_only_the_styles_and_the_script_that_are_on_the_page(page: str) -> None:
    parsed = Page(page)
    (policy,) = [meta["content"] for meta in parsed.all("meta") if "http-equiv" in meta]
    style, script = (
        base64.b64encode(hashlib.sha256("".join(texts).encode()).digest()).decode()
        for texts in (parsed.styles, parsed.scripts)
    )
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}';"
        " base-uri 'none'; form-action 'none'"
    )


def test_the_page_tells_what_ran_and_how_it_ended(page: str) -> None:
    text = Page(page).text
    for words in (
        "python-docs-gpt",
        "finished",
        "gpt, 8 blocks, width 128, context 128",
        "4, on 2 nodes",
        "3 + 2 + 2 + 3 layers in 4 stages",
        "1f1b, 8 microbatches of 4 samples",
        "cpu, float32, 1 thread per rank",
        "adamw, peak learning rate 0.001, weight decay 0.1, clip norm 1, 20 warm-up steps",
        "9f2c" * 16,
        "runs/python-docs-gpt/checkpoints/step-00000200-g1",
        "The checkpoint of step 100 failed, the ones before it stay: no space left on device",
        "1 step skipped, no weight was changed: the gradient norm was not finite (step 88).",
        '"warmup_steps": 20',
        "remembers the order in which entries were added.",
    ):
        assert words in text, words
    assert "emulated" not in text


def test_an_emulated_run_says_so_wherever_a_time_stands() -> None:
    text = Page(render(fold(records(device="emulated", steps=30)))).text
    assert (
        "Emulated device: times, rates and the timeline on this page come from modelled layer times" in text
    )
    for words in (
        "Throughputemulated",
        "Step timeemulated",
        "as measuredemulated",
        "tokens/s, median, emulated",
    ):
        assert words in text, words


def test_every_chart_has_a_name_words_a_table_and_its_points(page: str) -> None:
    parsed = Page(page)
    assert list(parsed.charts) == ["Loss", "Throughput", "Gradient norm", "Step time"]
    for chart in parsed.charts.values():
        assert chart["x"]["label"] == "step"
        assert chart["y"]["label"]
        measured = chart["series"][0]
        assert measured["x"] == list(range(1, STEPS + 1))
        low, high = chart["y"]["range"]
        assert sum(value is None or low <= value <= high for value in measured["y"]) >= STEPS - 3
    words = [figure["aria-label"] for figure in parsed.all("div") if figure.get("role") == "img"]
    assert [text.split(",")[0] for text in words] == list(parsed.charts)
    assert all(text in parsed.text for text in words)
    assert parsed.text.count("Values") == len(parsed.charts)
    assert parsed.charts["Loss"]["marks"] == [88]
    assert "skipped step 88" in parsed.text


def test_the_timeline_has_one_box_for_each_action(page: str) -> None:
    (timeline,) = Page(page).timelines
    (step,) = timeline["groups"]
    lanes = [tokens(lane) for lane in step["lanes"]]
    assert [len(lane) for lane in lanes] == [MICROBATCHES * 2] * RANKS
    for stage, lane in enumerate(lanes):
        assert set(lane) == {f"{stage}{kind}{m}" for kind in "FB" for m in range(MICROBATCHES)}


def test_idle_time_is_divided_by_cause_for_each_rank(page: str) -> None:
    text = Page(page).text
    assert "Idle time by cause, measured" in text
    for cause in ("Dependency", "Imbalance", "Communication", "Straggler"):
        assert text.count(cause) == 2
    assert "Expected times: each stage's median times in this step." in text
    assert re.search(
        r"The critical path explains the window of \d+ ms: \d+ actions on 4 ranks, computing", text
    )
    (timeline,) = Page(page).timelines
    assert all(lane["critical"] for lane in timeline["groups"][0]["lanes"])


def test_hostile_text_is_only_text() -> None:
    run = fold(records(steps=3, sample=HOSTILE))
    run.job = run.spec["job"]["name"] = run.spec["data"]["source"] = run.spec["model"]["family"] = HOSTILE
    assert run.plan is not None
    run.plan = dataclasses.replace(run.plan, reason=HOSTILE, schedule=HOSTILE)
    run.fold(Record(time_s=0.0, event=CheckpointReport(step=3, path=HOSTILE, bytes=1, seconds=1.0)))
    run.fold(Record(time_s=0.0, event=RankFailed(rank=1, error=HOSTILE)))
    html = render(run)
    parsed = Page(html)
    plain = Page(render(fold(records(steps=3))))
    assert parsed.scripts == plain.scripts
    assert len(parsed.all("script")) == len(plain.all("script"))
    assert parsed.all("img") == []
    assert parsed.text.count(HOSTILE) >= 8


def test_a_failed_and_resumed_job_keeps_only_the_steps_that_led_to_its_weights() -> None:
    generation = next(r.event.generation for r in records(steps=1) if isinstance(r.event, Formed))
    run = with_event(
        RankFailed(rank=2, error="killed by signal 9"),
        Failed(reason="rank 2 was lost", user_error=False),
        Submitted(job="python-docs-gpt", epoch=2, spec=spec(), resume=True),
        Skipped(
            rank=0, damage=DamagedCheckpoint(path="step-40", file="layer-3.safetensors", problem="truncated")
        ),
        Issued(plan=plan()),
        Formed(generation=generation, start=CheckpointRef(path="step-30", step=30), step=30),
    )
    assert list(run.steps) == list(range(1, 31))
    assert list(run.validations) == [25]
    assert run.timelines == {}
    assert run.sample is None
    text = Page(render(run)).text
    for words in (
        "not finished",
        "Rank 2 failed: killed by signal 9",
        "The job failed: rank 2 was lost",
        "The job was resumed.",
        "A damaged checkpoint was passed over: step-40, layer-3.safetensors: truncated.",
        "30 steps over 2 runs",
    ):
        assert words in text, words


def test_how_a_run_ends_is_said() -> None:
    for event, words in (
        (Finished(step=40, stopped=True, state_sha256=None), "stopped at step 40"),
        (Finished(step=40, stopped=False, state_sha256=None), "finished"),
        (
            Finished(step=40, stopped=False, state_sha256=None, reached="f1 0.9"),
            "finished with f1 0.9",
        ),
        (
            Finished(step=40, stopped=False, state_sha256=None, plateau="no better than loss 1 of step 8"),
            "finished: no better than loss 1 of step 8",
        ),
        (Failed(reason="no", user_error=True), "failed"),
    ):
        assert f">{words}</span>" in render(with_event(event))
    assert "Someone cancelled the job." in render(with_event(Requested(request="stop")))


def test_the_timeline_of_the_newest_step_is_shown_and_a_missing_rank_is_an_empty_lane() -> None:
    span = ActionSpan(action="0F0", start_s=0.1, end_s=0.2)
    newer = [TimelineReport(step=41, rank=rank, step_s=0.5, spans=(span,), memory_bytes=0) for rank in (0, 2)]
    older = TimelineReport(step=12, rank=1, step_s=0.5, spans=(span,) * 3, memory_bytes=0)
    run = with_event(*newer, older)
    assert sorted(run.timelines) == [0, 2]
    html = render(run)
    assert "Step 41 as measured" in html
    (timeline,) = Page(html).timelines
    assert [tokens(lane) for lane in timeline["groups"][0]["lanes"]] == [["0F0"], [], ["0F0"]]
    # Without every rank's actions nobody knows what the others waited for.
    assert "Idle time by cause" not in html


@pytest.mark.parametrize("kept", [0, 1, 2, 6, 7, 8])
def test_a_log_that_breaks_off_anywhere_still_gives_a_page(kept: int) -> None:
    Page(render(fold(records(steps=1)[:kept])))


def test_steps_that_are_not_finite_are_gaps() -> None:
    run = fold(records(steps=5)[:-6])
    for step, report in run.steps.items():
        run.steps[step] = dataclasses.replace(report, loss=math.nan, grad_norm=math.inf, skipped=True)
    page = Page(render(run))
    assert page.charts["Loss"]["series"][0]["y"] == [None] * 5
    assert "5 steps skipped" in page.text
    assert "training: no values." in page.text


def test_a_long_run_is_thinned_and_keeps_its_spikes() -> None:
    points = [(float(step), 1.0 + step % 3) for step in range(1, 50_001)]
    points[31_415] = (31_416.0, 9.0)
    thinned = charts.bins(points)
    assert len(thinned) == charts.MOST_BINS
    assert [part.step for part in thinned] == sorted(part.step for part in thinned)
    assert {(part.low, part.middle) for part in thinned} == {(1.0, 2.0)}
    assert [part.high for part in thinned if part.high > 3] == [9.0]
    chart = Chart(title="t", unit="u", series=(Series(name="s", points=tuple(points)),), format=significant)
    (drawn,) = chart.data["series"]  # pyright: ignore[reportGeneralTypeIssues]
    assert drawn["y"] == [2] * charts.MOST_BINS
    assert max(drawn["high"]) == 9
    assert len(json.dumps(drawn)) < 10_000
    assert len(chart.rows) == charts.MOST_ROWS
    assert (chart.rows[0][0], chart.rows[-1][0]) == ("1", "50,000")


def test_the_table_of_stepped_curves_has_every_change_of_each() -> None:
    live = Series(name="live", points=((0, 4), (5, 3), (9, 3)), stepped=True)
    training = Series(name="training", points=((0, 4), (3, 0), (9, 3)), stepped=True)
    chart = Chart(title="t", unit="nodes", series=(live, training), format=significant, axis="second")
    assert chart.rows == [
        ("0", "4.00", "4.00"),
        ("3", "4.00", "0"),
        ("5", "3.00", "0"),
        ("9", "3.00", "3.00"),
    ]


@pytest.mark.parametrize("count", [601, 719, 1201])
def test_thinning_leaves_no_point_out(count: int) -> None:
    points = [(float(step), float(step)) for step in range(count)]
    thinned = charts.bins(points)
    assert (thinned[0].low, thinned[-1].high) == (0, count - 1)
    assert all(before.high + 1 == after.low for before, after in pairwise(thinned))


def test_a_series_that_is_thin_at_its_beginning_is_drawn_in_equal_steps() -> None:
    """Of a long run each older point stands for many steps."""
    points = [(float(step), 1.0) for step in (*range(0, 50_000, 50), *range(50_000, 51_000))]
    thinned = charts.bins(points)
    width = 51_000 / charts.MOST_BINS
    assert all(after.step - before.step < 2 * width for before, after in pairwise(thinned))
    assert len(thinned) >= charts.MOST_BINS - 2


def test_a_short_series_is_drawn_point_by_point() -> None:
    assert charts.bins([]) == []
    assert charts.bins([(float(step), 2.0) for step in range(600)])[599] == Bin(599.0, 2.0, 2.0, 2.0)


def test_an_outlier_is_marked_at_the_top_and_does_not_flatten_the_rest() -> None:
    points = tuple((float(step), 500.0 if step == 1 else 10.0) for step in range(1, 101))
    chart = Chart(
        title="t", unit="ms", series=(Series(name="s", points=points),), format=significant, from_zero=True
    )
    assert chart.values.above == 1
    assert 10 < chart.values.high < 20


@pytest.mark.parametrize(
    ("step_s", "first_s", "steps", "unit", "highest"),
    [
        (0.25, 4.0, 10, "s", 4.0),  # 4 s, and not 4k ms
        (0.25, 4.0, 100, "ms", 250.0),  # the first step is above the axis
        (0.25, 0.95, 10, "s", 0.95),  # the axis goes beyond a second
        (0.25, 0.25, 10, "ms", 250.0),
        (0.000_25, 0.000_25, 10, "µs", 250.0),
        (2.0, 2.0, 10, "s", 2.0),
    ],
)
def test_times_are_in_the_unit_that_suits_the_axis(
    step_s: float, first_s: float, steps: int, unit: str, highest: float
) -> None:
    points = tuple((float(step), first_s if step == 1 else step_s) for step in range(1, steps + 1))
    chart = of_times(
        Chart(
            title="t", unit="s", series=(Series(name="s", points=points),), format=significant, from_zero=True
        )
    )
    assert chart.unit == f"time, {unit}"
    assert chart.values.high < 1000
    assert max(value for _, value in chart.series[0].points if value <= chart.values.high) == pytest.approx(
        highest
    )


def test_a_short_run_with_a_slow_first_step_is_drawn_in_seconds() -> None:
    """Its first step takes 1.21 s, the others 0.13 s."""
    part = training(fold(records(steps=10)))
    assert part is not None
    (drawn,) = [chart for chart in part.charts if chart.title == "Step time"]
    assert drawn.unit == "time, s"
    assert drawn.series[0].points[0] == (1, 1.21)


def test_values_are_told_as_exactly_as_they_are_seen() -> None:
    narrow = ValueAxis(low=2.1, high=2.2)
    assert [narrow.rounded(value) for value in (2.123456789, 0.0001234567, 3.0)] == [2.12346, 0.0001235, 3]
    wide = ValueAxis(low=0.0, high=300_000.0)
    assert [wide.rounded(value) for value in (123_456.789, 1234.5678, 0.0)] == [123_500, 1235, 0]
    assert ValueAxis(1e-6, 1e6, logarithmic=True).rounded(0.00123456) == 0.001235


def test_a_wide_range_gets_a_logarithmic_axis() -> None:
    points = tuple((float(step), 10.0 ** (step / 20)) for step in range(1, 101))
    chart = Chart(
        title="t", unit="u", series=(Series(name="s", points=points),), format=significant, logarithmic=True
    )
    assert chart.values.logarithmic
    assert chart.data["y"] == {"label": "u (log scale)", "range": [1.02002, 110000], "log": True}


def test_the_report_is_written_whole_beside_its_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for record in records(steps=4):
        log.append(record)
    log.close()
    written = write_report(tmp_path / "events.jsonl")
    assert written == tmp_path / "report.html"
    assert written.read_text(encoding="utf-8") == render(fold(records(steps=4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "nonsense", "time_s": 1}\n')
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(ValueError, match="line 1"):
        write_report(tmp_path / "events.jsonl")
    assert (tmp_path / "report.html").read_text() == "old"


def test_the_report_needs_no_torch() -> None:
    modules = "orchestrator.report.page, orchestrator.cli.text.progress"
    code = f"import sys, {modules}; print({{'torch', 'ray'}} & set(sys.modules))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_thousands_of_steps_make_a_page_of_modest_size() -> None:
    random = Random(1)
    run = fold(records(steps=1))
    run.steps = {step: step_report(step, random) for step in range(1, 20_001)}
    for step in range(0, 20_001, 500):
        run.fold(Record(time_s=run.last_s, event=ValidationReport(step=step or 1, loss=2.0)))
    run.fold(Record(time_s=run.last_s, event=SampleReport(step=20_000, prompt="a", text="b")))
    assert len(render(run)) < 250_000
