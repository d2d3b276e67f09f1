"""The page and the lines about an interference model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from chromium import needs_chromium, open_page

from orchestrator.cli.interference import fit_lines
from orchestrator.report.interference.model_page import model_page, write_model_page
from planner.features import NAMES
from planner.interference.forest import Forest
from planner.interference.judgement import Judgement, Score
from planner.interference.model_file import StoredForest

KINDS = (("disk", 0.04), ("memory", 0.06))
JUDGEMENT = Judgement(
    scores=(
        Score(model="forest", r2=0.91, median_error=0.05, by_kind=KINDS),
        Score(model="linear", r2=-0.2, median_error=0.125, by_kind=KINDS),
        Score(model="network", r2=0.1, median_error=0.2, by_kind=KINDS),
        Score(model="measured", r2=0.8, median_error=0.07, by_kind=KINDS),
    ),
    importances=(("own_waiting", 0.6), ("work", 0.1)),
    calibration=((1.01, 1.0, 40), (1.5, 1.62, 40), (2.9, 3.0, 40)),
    latency_s=0.0041,
    windows=1560,
    warnings=("the machine is <busy>",),
)
STORED = StoredForest(
    forest=Forest(
        roots=np.array([0], dtype=np.int32),
        left=np.array([-1], dtype=np.int32),
        right=np.array([-1], dtype=np.int32),
        feature=np.array([0], dtype=np.int32),
        threshold=np.array([0.0]),
        missing_left=np.array([False]),
        value=np.array([1.0]),
        columns=len(NAMES),
    ),
    machine="a host",
    made="2026-01-02",
    judgement=JUDGEMENT,
)


def test_the_page_sets_the_forest_beside_its_rivals() -> None:
    page = model_page(STORED)
    assert page.title == "a host"
    assert page.summary.startswith("1 trees · 1,560 windows · ")
    assert [(tile.name, tile.number, tile.unit) for tile in page.tiles] == [
        ("Median error", "5.0", "%"),
        ("R²", "0.91", ""),
        ("100 predictions", "4.10", "ms"),
    ]
    assert page.models.rows[-1] == ("last measured ratio", "7.0 %", "0.80")
    assert page.kinds.rows == (("disk", *["4.0 %"] * 4), ("memory", *["6.0 %"] * 4))
    assert page.importances.rows[0][:2] == ("own_waiting", "60.0 %")
    assert page.calibration.series[0].points == ((1.01, 1.0), (1.5, 1.62), (2.9, 3.0))


def test_the_lines_say_the_same() -> None:
    lines = [*fit_lines(JUDGEMENT)]
    assert lines[1] == "  forest   R2 0.91, median error 5.0% (disk 4.0%, memory 6.0%)"
    assert "what matters: own_waiting 60%, work 10%" in lines
    assert lines[-2:] == ["100 candidates are predicted in 4.1 ms", "warning: the machine is <busy>"]


@needs_chromium
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    path = write_model_page(STORED, tmp_path / "model.html")
    opened = open_page(path, tmp_path / "profile")
    assert opened.console == []
    assert len(opened.canvases) == 1
    assert "the machine is &lt;busy&gt;" in opened.dom
