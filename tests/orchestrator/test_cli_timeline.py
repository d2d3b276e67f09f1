"""`freshet timeline`: a measured step of a run beside its prediction, in a terminal and in files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from synthetic_run import freezing_records, records
from test_cli_train import freshet_here

from orchestrator.cli.main import DONE, USER_ERROR
from orchestrator.events import Record, StepReport
from workers.protocol import TimelineReport


def write_run(folder: Path, log: list[Record]) -> Path:
    (folder / "events.jsonl").write_text("".join(record.to_json() + "\n" for record in log))
    return folder


def newest(log: list[Record]) -> list[TimelineReport]:
    timelines = [r.event for r in log if isinstance(r.event, TimelineReport)]
    return [t for t in timelines if t.step == max(t.step for t in timelines)]


def test_a_terminal_shows_both_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = freezing_records()
    run = write_run(tmp_path, log)
    assert freshet_here("timeline", str(run)) == DONE
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"step {newest(log)[0].step}, ")
    first, second = told.index("predicted"), told.index("measured")
    for start in (first, second):
        assert [line[:6] for line in told[start + 1 : start + 5]] == [f"rank {r}" for r in range(4)]
    # One axis for both.
    assert told[first + 5] == told[second + 5]


def test_a_trace_holds_every_span_of_both(tmp_path: Path) -> None:
    log = freezing_records()
    out = tmp_path / "step.json"
    assert freshet_here("timeline", str(write_run(tmp_path, log)), "--out", str(out)) == DONE
    trace = json.loads(out.read_text())["traceEvents"]
    groups = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    boxes = {
        name: [e for e in trace if e["ph"] == "X" and groups[e["pid"]] == name] for name in groups.values()
    }
    measured = [span for report in newest(log) for span in report.spans]
    assert boxes.keys() == {"predicted", "measured"}
    assert [box["name"] for box in boxes["measured"]] == [span.action for span in measured]
    assert [box["dur"] for box in boxes["measured"]] == pytest.approx(
        [1e6 * (span.end_s - span.start_s) for span in measured], abs=0.01
    )
    assert sorted(box["name"] for box in boxes["predicted"]) == sorted(span.action for span in measured)


def test_pictures(tmp_path: Path) -> None:
    run = write_run(tmp_path, freezing_records())
    for name in ("step.svg", "step.html"):
        assert freshet_here("timeline", str(run), "--out", str(tmp_path / name)) == DONE
    svg = (tmp_path / "step.svg").read_text()
    ElementTree.fromstring(svg)
    assert svg in (tmp_path / "step.html").read_text()


def test_a_run_without_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("timeline", str(write_run(tmp_path, records()))) == DONE
    told = capsys.readouterr().out.splitlines()
    assert "measured" in told
    assert "predicted" not in told


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, [r for r in records() if isinstance(r.event, StepReport)])
    for arguments, message in [
        ((str(tmp_path / "gone"),), "holds no event log"),
        ((str(run),), "holds no timeline yet"),
        ((str(run), "--out", "step.pdf"), "use one of .svg, .html, .json"),
        ((str(run), "--out", str(tmp_path / "no" / "step.svg")), "holds no timeline yet"),
    ]:
        assert freshet_here("timeline", *arguments) == USER_ERROR
        assert message in capsys.readouterr().err
    write_run(tmp_path, records())
    assert freshet_here("timeline", str(run), "--out", str(tmp_path / "no" / "step.svg")) == USER_ERROR
    assert "No such file or directory" in capsys.readouterr().err
    (run / "events.jsonl").write_text("no event\n")
    assert freshet_here("timeline", str(run)) == USER_ERROR
    assert "line 1" in capsys.readouterr().err
