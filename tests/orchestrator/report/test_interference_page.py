"""The page and the lines about jobs beside a neighbour."""

from __future__ import annotations

from pathlib import Path

from chromium import needs_chromium, open_page
from disturbed_run import disturbed

from orchestrator.analysis.interference_time import interference_time
from orchestrator.report.interference.interference_page import interference_page, render
from orchestrator.report.interference.interference_text import lines
from orchestrator.report.parts import Pill


def test_both_jobs_stand_beside_each_other() -> None:
    page = interference_page([disturbed("off"), disturbed("measured")], "gpt")
    assert page.part.disturbed == "Rank 1 was slowed down by a heavy neighbour (compute) on core 1."
    assert [series.name for series in page.chart.series] == ["off", "measured"]
    assert page.chart.series[0].points[30] == (31, 300.0)
    assert page.chart.series[1].points[30] == (31, 150.0)
    assert [(band.first, band.last) for band in page.chart.bands] == [(21, 40), (61, 80)]
    rows = {row[0]: row[1:] for row in page.part.numbers.rows}
    assert rows["Productive time"] == ("65.7 %", "92.7 %")
    assert rows["Moves of layers"] == ("0", "3")
    off_by = "Step with each new plan, measured over predicted"
    assert rows[off_by] == ("–", "+0.0 % (-33.3 % to +0.0 %)")
    assert rows["State SHA-256"] == (Pill("aaaaaaaa…", "good"),) * 2
    (note,) = page.notes
    assert (note.tone, note.name) == ("good", "Verdict")
    assert note.text == "adapt.policy = 'measured' pays: productive time 65.7 % -> 92.7 %."


def test_visits_say_what_was_detected_and_decisions_what_was_predicted_and_measured() -> None:
    page = interference_page([disturbed("off"), disturbed("measured")], "gpt")
    assert page.part.answers is not None
    assert [row[:2] for row in page.part.answers.rows] == [
        ("21–40", "off"),
        ("61–80", "off"),
        ("21–40", "measured"),
        ("61–80", "measured"),
    ]
    assert page.part.answers.rows[2][2:] == (
        "slowest rank 1.00 -> 3.00 times its expected times, noticed after 2 steps",
        "after 3 steps",
        "150 ms",
    )
    (adapted,) = page.adapted
    assert adapted.speeds is not None
    assert adapted.speeds.decisions is not None
    oldest = adapted.speeds.decisions.rows[-1]
    assert (oldest[0], oldest[3:]) == ("21", ("3: place 1 → 0", "300 ms", "150 ms", "150 ms", "+0.0 %"))
    assert adapted.moves is not None
    assert len(adapted.moves.rows) == 3


def test_what_went_wrong_is_noted() -> None:
    runs = [disturbed("off"), disturbed("measured", last=50, state="b" * 64)]
    texts = [note.text for note in interference_page(runs, "gpt").notes if note.name != "Verdict"]
    assert texts == ["The jobs ended with different states.", "measured: the job was not trained to its end."]


def test_the_numbers_are_told_in_words() -> None:
    assert lines(interference_time([disturbed("off"), disturbed("measured")])) == [
        "a step without the neighbour: 100 ms, beside it 150 ms with the best cut",
        "adapt.policy = 'off': 95 steps in 17.5 s, productive time 65.7 %, 300 ms a step beside the neighbour,"
        " 0 committed steps lost",
        "  steps 21 to 40: 300 ms a step in the second half",
        "  steps 61 to 80: 300 ms a step in the second half",
        "adapt.policy = 'measured': 95 steps in 12.4 s, productive time 92.7 %, 150 ms a step beside the neighbour,"
        " 0 committed steps lost",
        "  steps 21 to 40: slowest rank 1.00 -> 3.00 times its expected times, noticed after 2 steps, layers moved"
        " after 3 steps, 150 ms a step in the second half",
        "  steps 61 to 80: slowest rank 1.00 -> 2.80 times its expected times, noticed within the first step, layers"
        " moved after 3 steps, 150 ms a step in the second half",
        "  plan after step 21, 2 + 3 + 2 + 3 layers: 150 ms a step predicted, 150 ms measured (+0.0 %)",
        "  plan after step 41, 2 + 3 + 2 + 3 layers: 150 ms a step predicted, 100 ms measured (-33.3 %)",
        "  plan after step 61, 2 + 3 + 2 + 3 layers: 150 ms a step predicted, 150 ms measured (+0.0 %)",
        "all jobs end with the same state_sha256",
        "verdict: adapt.policy = 'measured' pays: productive time 65.7 % -> 92.7 %",
    ]


@needs_chromium
def test_the_charts_are_drawn_and_nothing_is_complained_of(tmp_path: Path) -> None:
    page = tmp_path / "interference.html"
    page.write_text(render(interference_page([disturbed("off"), disturbed("measured")], "gpt")))
    opened = open_page(page, tmp_path / "profile")
    assert len(opened.canvases) == 2
    assert opened.console == []
