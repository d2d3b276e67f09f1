"""`freshet timeline`: a measured step of a run beside its prediction, in a terminal and in files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from command_line import freshet_here
from made_profile import made_profile
from report_page import Page, tokens
from synthetic_run import STEPS, freezing_records, plan, records, timelines

from dashboard.api.history import TimelineModel
from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.events.types import Formed, Issued, Record, Submitted
from orchestrator.history.folder import PROFILE
from orchestrator.history.job_view import fold
from orchestrator.pictures.memory_use import bytes_text
from orchestrator.prepare.planning import as_planned
from orchestrator.report.page import write_report
from orchestrator.spec.job_spec import Spec
from planner.schedule.registry import build
from planner.simulation.predict import predict
from workers.protocol.reports import StepReport, TimelineReport


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
    first, second = told.index("measured"), told.index("predicted")
    for start in (first, second):
        lanes = told[start + 1 : start + 9]
        assert [line[:6] for line in lanes[::2]] == [f"rank {r}" for r in range(4)]
        # Below each rank, its actions on the critical path.
        assert all(set(line) == {" ", "▔"} for line in lanes[1::2])
    # Both have the same axis.
    assert told[first + 9] == told[second + 9]


def test_a_terminal_tells_why_ranks_were_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("timeline", str(write_run(tmp_path, freezing_records()))) == DONE
    told = capsys.readouterr().out
    table = told[told.index("Idle time by cause, measured") :].splitlines()
    assert table[1].split() == [
        "Rank",
        "Computing",
        "Idle",
        "Dependency",
        "Imbalance",
        "Communication",
        "Straggler",
    ]
    assert [line.split()[0] for line in table[2:6]] == ["0", "1", "2", "3"]
    assert "The critical path explains the window of" in " ".join(told.split())


def test_a_trace_holds_every_span_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = freezing_records()
    out = tmp_path / "step.json"
    assert freshet_here("timeline", str(write_run(tmp_path, log)), "--out", str(out)) == DONE
    assert capsys.readouterr().out == f"step {newest(log)[0].step}: wrote {out}\n"
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


def test_programs_get_the_steps_in_the_shape_of_the_rest_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = freezing_records()
    run = write_run(tmp_path, log)
    assert freshet_here("timeline", str(run), "--json") == DONE
    text = capsys.readouterr().out
    told = TimelineModel.model_validate_json(text, extra="forbid")
    assert told.model_dump(mode="json") == json.loads(text)
    measured = newest(log)
    assert (told.step, told.source, told.step_s) == (measured[0].step, "measured", measured[0].step_s)
    assert [(s.rank, s.action, s.start_s, s.end_s) for s in told.spans] == [
        (report.rank, span.action, span.start_s, span.end_s) for report in measured for span in report.spans
    ]
    assert told.steps == sorted(fold(log).measured)
    assert freshet_here("timeline", str(run), "--step", str(told.steps[0]), "--json") == DONE
    earlier = json.loads(capsys.readouterr().out)
    assert (earlier["step"], earlier["steps"]) == (told.steps[0], told.steps)


def test_pictures(tmp_path: Path) -> None:
    run = write_run(tmp_path, freezing_records())
    for name in ("step.svg", "step.html"):
        assert freshet_here("timeline", str(run), "--out", str(tmp_path / name)) == DONE
    svg, page = ((tmp_path / name).read_text() for name in ("step.svg", "step.html"))
    ElementTree.fromstring(svg)
    boxes = re.findall(r"<title>\d[FB]\d: .*?</title>", svg)
    assert len(boxes) == 128
    assert 'class="critical"' in svg
    (timeline,) = Page(page).timelines
    lanes = [lane for group in timeline["groups"] for lane in group["lanes"]]
    assert [token for lane in lanes for token in tokens(lane)] == [
        box.removeprefix("<title>").split(":")[0] for box in boxes
    ]
    marked = [number for number, box in enumerate(boxes) if "on the critical path" in box]
    assert marked == [16 * rank + number for rank, lane in enumerate(lanes) for number in lane["critical"]]


def test_a_step_of_several_windows(tmp_path: Path) -> None:
    log = [record for record in records() if not isinstance(record.event, TimelineReport)]
    log[1] = replace(log[1], event=Issued(plan=replace(plan(), replicas=2, pipelines=1)))
    measured = [report for step in (100, STEPS) for report in timelines(step, Random(4), windows=2)]
    log[-1:-1] = [Record(time_s=log[-1].time_s, event=report) for report in measured]
    run = write_run(tmp_path, log)
    out = tmp_path / "step.json"
    assert freshet_here("timeline", str(run), "--out", str(out)) == DONE
    boxes = Counter(e["name"] for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X")
    assert set(boxes.values()) == {4}  # in two windows, as predicted and as measured
    assert boxes.keys() == {span.action for report in measured for span in report.spans}
    assert write_report(run / "events.jsonl").is_file()


@pytest.mark.parametrize("freezes", [False, True])
def test_memory_is_that_of_the_profile_beside_the_log(
    freezes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = freezing_records() if freezes else records()
    run, out = write_run(tmp_path, log), tmp_path / "step.json"
    assert freshet_here("timeline", str(run)) == DONE
    assert "memory" not in capsys.readouterr().out
    profile = made_profile([f"layer{i}" for i in range(10)], [500, *[100] * 8, 500], 4)
    (run / PROFILE).write_text(profile.to_json())

    # Without freezing it is what is predicted for the plan, no matter how long actions took.
    predicted = predict(profile, plan(), build("1f1b", 4, 8)).memory.peak_bytes
    assert freshet_here("timeline", str(run)) == DONE
    told = " ".join(capsys.readouterr().out.split())
    told = told[told.index("peak memory, as the profile counts it: rank 0 ") :].split(" Idle time")[0]
    if not freezes:
        assert told.endswith(", ".join(f"rank {r} {bytes_text(peak)}" for r, peak in enumerate(predicted)))

    # Each drawn group has a strip per rank, and each rank a counter in the trace.
    groups = {"predicted", "measured"} if freezes else {"measured"}
    page = Page(write_report(run / "events.jsonl").read_text())
    (timeline,) = page.timelines
    peaks = [lane["memory"]["peak"] for group in timeline["groups"] for lane in group["lanes"]]
    assert len(peaks) == 4 * len(groups)
    assert told.endswith(", ".join(f"rank {rank} {peak}" for rank, peak in enumerate(peaks[:4])))
    assert told in page.text
    assert "Expected times: the profile's times." in page.text
    assert freshet_here("timeline", str(run), "--out", str(out)) == DONE
    trace = json.loads(out.read_text())["traceEvents"]
    of_process = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    most = Counter[tuple[str, str]]()
    for each in trace:
        if each["ph"] == "C" and "bytes" in each["args"]:
            key = (of_process[each["pid"]], each["name"])
            most[key] = max(most[key], each["args"]["bytes"])
    assert most.keys() == {(group, f"rank {rank} memory, all") for group in groups for rank in range(4)}
    for (_, name), peak in most.items():
        rank = int(name.split()[1])
        # Frozen weight gradients are neither formed nor kept.
        assert peak <= predicted[rank] if freezes else peak == predicted[rank]


@pytest.mark.parametrize("method", ["none", "apf"])
def test_memory_of_all_pipelines_with_what_the_method_keeps(method: str, tmp_path: Path) -> None:
    log = [record for record in records() if not isinstance(record.event, TimelineReport)]
    twice = replace(plan(), replicas=2)
    log[1] = replace(log[1], event=Issued(plan=twice))
    submitted = log[0].event
    assert isinstance(submitted, Submitted)
    spec = Spec.model_validate(submitted.spec)
    spec = spec.model_copy(update={"freeze": spec.freeze.model_copy(update={"method": method})})
    log[0] = replace(log[0], event=replace(submitted, spec=spec.model_dump(mode="json")))
    for step in (100, STEPS):
        for report in timelines(step, Random(step)):
            log[-1:-1] = [
                Record(time_s=log[-1].time_s, event=replace(report, rank=report.rank + first))
                for first in (0, 4)
            ]
    run, out = write_run(tmp_path, log), tmp_path / "step.svg"
    profile = made_profile([f"layer{i}" for i in range(10)], [500, *[100] * 8, 500], 4)
    (run / PROFILE).write_text(profile.to_json())
    assert freshet_here("timeline", str(run), "--out", str(out)) == DONE
    planned = predict(as_planned(profile, spec), twice, build("1f1b", 4, 8)).memory.peak_bytes
    assert (max(planned) > max(predict(profile, twice, build("1f1b", 4, 8)).memory.peak_bytes)) is (
        method == "apf"
    )
    told = re.findall(r"<title>rank (\d): at most ([^<]*)</title>", out.read_text())
    peaks = [(str(rank), bytes_text(peak)) for rank, peak in enumerate(planned)]
    both = [(str(rank + 4), text) for rank, (_, text) in enumerate(peaks)]
    predicted = peaks if method == "none" else []  # of one pipeline; apf has no prediction
    assert told == [*peaks, *both, *predicted]


def test_a_step_of_another_plan_shows_no_memory(tmp_path: Path) -> None:
    """The job was partitioned again for fewer ranks after the newest measured step."""
    log = records()
    fewer = replace(plan(), layers=((0, 5), (5, 8), (8, 10)), stage_ranks=(0, 1, 2))
    formed = next(record.event for record in log if isinstance(record.event, Formed))
    again = (Issued(plan=fewer), replace(formed, step=max(fold(log).measured)))
    run = write_run(tmp_path, [*log[:-1], *(replace(log[-1], event=event) for event in again)])
    profile = made_profile([f"layer{i}" for i in range(10)], [100] * 10, 4)
    (run / PROFILE).write_text(profile.to_json())
    out = tmp_path / "step.svg"
    assert freshet_here("timeline", str(run), "--out", str(out)) == DONE
    assert 'class="room"' not in out.read_text()


def test_a_profile_of_fewer_devices_or_none_at_all_shows_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, records())
    few = made_profile([f"layer{i}" for i in range(10)], [100] * 10, 2).to_json()
    for text in (few, "no profile"):
        (run / PROFILE).write_text(text)
        assert freshet_here("timeline", str(run)) == DONE
        assert "memory" not in capsys.readouterr().out


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
        ((str(run), "--out", "step.svg", "--json"), "give one of them"),
    ]:
        assert freshet_here("timeline", *arguments) == USER_ERROR
        assert message in capsys.readouterr().err
    write_run(tmp_path, records())
    assert freshet_here("timeline", str(run), "--out", str(tmp_path / "no" / "step.svg")) == USER_ERROR
    assert "No such file or directory" in capsys.readouterr().err
    (run / "events.jsonl").write_text("no event\n")
    assert freshet_here("timeline", str(run)) == USER_ERROR
    assert "line 1" in capsys.readouterr().err
