"""`freshet plan` as users run it: tables, JSON with the documented keys, timelines, short error messages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from command_line import freshet_here
from made_profile import made_profile
from report_page import Page
from synthetic_run import plan as issued_plan
from synthetic_run import step_report
from tiny_jobs import write_spec

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.events.log import EventLog
from orchestrator.events.types import Issued, Record
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.spec.job_spec import load
from workers.protocol.reports import CurvatureReport

KEYS = {
    "partition",
    "ranks",
    "schedule",
    "microbatches",
    "shares",
    "predicted_step_s",
    "bubble",
    "peak_memory_bytes",
    "alternatives",
    "solve_s",
    "redundancy",
    "freeze",
    "steps",
    "step_samples",
    "train_samples",
    "epochs",
}
FREEZE_KEYS = {"unfrozen_s", "solved_s", "all_frozen_s", "ratios", "mean_per_stage", "kappa"}
TIMELY = (
    *("--set", "freeze.method=timelyfreeze", "--set", "freeze.r_max=0.8"),
    *("--set", "job.steps=100"),
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec, beside `profile.json` of its model on four ranks."""
    monkeypatch.chdir(tmp_path)
    path = write_spec(tmp_path, "tiny")
    found = outline_model(absolute(load(path)))
    made = made_profile(found.layers, found.parameters, 4, weights=[0.1, 1, 1, 1, 1, 0.4])
    (tmp_path / "profile.json").write_text(made.to_json())
    return path


def plan(job: Path, *options: str) -> int | str | None:
    return freshet_here("plan", str(job), "--profile", "profile.json", *options)


def test_json_has_the_documented_keys(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(job, "--json", "--set", "pipeline.partition=dynpipe", *TIMELY) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == KEYS
    assert told["freeze"].keys() == FREEZE_KEYS
    assert [stop for _, stop in told["partition"]][-1] == 6
    assert (told["ranks"], told["schedule"], told["microbatches"]) == (4, "1f1b", 4)
    assert 0 < told["bubble"] < 1
    assert told["predicted_step_s"] > told["freeze"]["unfrozen_s"] > told["freeze"]["solved_s"]
    taken = [each for each in told["alternatives"] if not each["why_not"]]
    assert {json.dumps(each["partition"]) for each in taken} == {json.dumps(told["partition"])}
    assert len(told["freeze"]["ratios"]) == 16
    assert len(told["freeze"]["mean_per_stage"]) == 4


def test_redundancy_is_priced(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(mode: str | None) -> dict[str, Any]:
        options = () if mode is None else ("--set", f"elastic.redundancy={mode}")
        assert plan(job, "--json", "--set", "pipeline.partition=parameter", *options) == DONE
        return json.loads(capsys.readouterr().out)

    peer, alone = told(None), told("checkpoint")
    assert peer["redundancy"].keys() == {
        "mode",
        "bytes_per_step",
        "seconds_per_step",
        "memory_bytes",
        "on_host",
        "undone_steps",
        "copies",
    }
    assert (peer["redundancy"]["mode"], alone["redundancy"]["mode"]) == ("peer", "checkpoint")
    found = outline_model(absolute(load(job)))
    # A step sends every gradient once, in float32. Copies hold weights, gradients and two moments.
    assert peer["redundancy"]["bytes_per_step"] == 4 * sum(found.parameters)
    assert 4 * sum(found.parameters) <= peer["redundancy"]["memory_bytes"] <= 16 * sum(found.parameters)
    assert peer["redundancy"]["seconds_per_step"] == pytest.approx(
        peer["predicted_step_s"] - alone["predicted_step_s"]
    )
    assert peer["peak_memory_bytes"] > alone["peak_memory_bytes"]
    nothing = {"bytes_per_step": 0, "seconds_per_step": 0, "memory_bytes": 0, "undone_steps": 0, "copies": []}
    nothing["on_host"] = False
    assert alone["redundancy"] == {"mode": "checkpoint", **nothing}
    assert told("none")["redundancy"] == {"mode": "none", **nothing}


def test_each_copy_is_priced(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(copies: int) -> dict[str, Any]:
        options = ("--set", "pipeline.partition=parameter", "--set", f"elastic.copies={copies}")
        assert plan(job, "--json", *options) == DONE
        return json.loads(capsys.readouterr().out)

    one, two = told(1), told(2)
    none, *costs = (each for each in one["redundancy"]["copies"] if each["every"] < 2)
    assert [each["copies"] for each in (none, *costs)] == [0, 1, 2]
    assert (none["bytes_per_step"], none["memory_bytes"]) == (0, 0)
    # The rows are what the job's own plan with so many copies has.
    for found, cost in zip((one, two), costs, strict=True):
        assert found["predicted_step_s"] == cost["step_s"] > none["step_s"]
        assert {key: found["redundancy"][key] for key in ("bytes_per_step", "memory_bytes")} == {
            key: cost[key] for key in ("bytes_per_step", "memory_bytes")
        }
    assert costs[1]["bytes_per_step"] == 2 * costs[0]["bytes_per_step"]
    assert two["redundancy"]["copies"] == one["redundancy"]["copies"]
    assert len([each for each in told(3)["redundancy"]["copies"] if each["every"] < 2]) == 4


def test_snapshots_are_priced_beside_copies_of_each_step(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*options: str) -> dict[str, Any]:
        assert plan(job, "--json", "--set", "pipeline.partition=parameter", *options) == DONE
        return json.loads(capsys.readouterr().out)

    priced = told()["redundancy"]["copies"]
    first, *_ = rows = [each for each in priced if each["every"] > 1]
    assert rows
    own = told("--set", f"elastic.copy_every={first['every']}")
    for key in ("bytes_per_step", "memory_bytes", "undone_steps"):
        assert own["redundancy"][key] == first[key]
    assert own["predicted_step_s"] == first["step_s"]
    # State and moments in float32, sent once in so many steps; kept twice, by owner and copy.
    found = outline_model(absolute(load(job)))
    assert first["bytes_per_step"] == pytest.approx(12 * sum(found.parameters) / first["every"], rel=0.01)
    assert first["undone_steps"] < 2 * first["every"]
    by_copies = {(each["copies"], each["every"]): each["undone_steps"] for each in priced}
    assert (by_copies[0, 0], by_copies[1, 1]) == (None, 0)


def test_auto_takes_the_fastest_redundancy_that_keeps_the_promise(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(undone: int, *options: str) -> str:
        given = ("--set", "elastic.redundancy=auto", "--set", f"elastic.undone_steps={undone}")
        assert plan(job, "--set", "pipeline.partition=parameter", *given, *options) == DONE
        return capsys.readouterr().out

    assert (
        "redundancy: gradients to copies in each step, so that a lost rank undoes 0 committed steps"
        in told(0)
    )
    often = told(20)
    assert (
        every := re.search(
            r"redundancy: a snapshot every (\d+) steps, so that a lost rank undoes (\d+) ", often
        )
    )
    assert int(every[2]) <= 20
    assert re.search(r"at most \(instead: gradients to copies in each step \S+ ms\)", often)
    assert f"redundancy peer: every {every[1]} steps each rank copies its layers to host memory" in often
    rarely = told(20, "--set", "checkpoint.every_steps=10")
    assert "redundancy: checkpoints alone, so that a lost rank undoes 19 committed steps at most" in rarely
    assert "redundancy checkpoint: a lost rank takes the job back to its newest checkpoint" in rarely


def test_copies_for_which_there_are_too_few_ranks_are_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(job, "--set", "pipeline.ranks=2", "--set", "elastic.copies=2") == USER_ERROR
    assert (
        "elastic.copies = 2 needs 3 failure domains, a rank in each, and the job has 2"
        in capsys.readouterr().err
    )


def test_people_are_told_what_redundancy_costs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(job) == DONE
    assert re.search(
        r"redundancy peer: a step sends \S+ kB of gradients to copies, which makes it \S+ .s longer",
        capsys.readouterr().out,
    )
    assert plan(job, "--set", "elastic.copies=2") == DONE
    out = capsys.readouterr().out
    assert re.search(r"redundancy peer: a step sends \S+ kB of gradients to 2 copies of every layer", out)
    assert re.search(r"2 +each step +\S+ .?s \(\+\S+ .?s\) +\S+ kB +\S+ kB +any 2 nodes +nothing", out), out
    assert plan(job, "--set", "elastic.redundancy=checkpoint") == DONE
    assert "redundancy checkpoint: a lost rank takes the job back" in capsys.readouterr().out
    assert plan(job, "--set", "elastic.redundancy=none") == DONE
    assert "redundancy none: a lost rank ends the job" in capsys.readouterr().out
    assert plan(job, "--set", "pipeline.ranks=1", "--set", "elastic.redundancy=peer") == USER_ERROR
    assert 'elastic.redundancy = "peer" keeps a copy' in capsys.readouterr().err


def test_what_is_auto_is_searched(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("ranks", "schedule", "microbatches")
    options = [part for key in keys for part in ("--set", f"pipeline.{key}=auto")]
    assert plan(job, "--json", *options) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["schedule"] != "auto"
    assert 1 <= told["ranks"] <= 4
    assert len({each["schedule"] for each in told["alternatives"]}) > 1
    assert told["freeze"]["kappa"] == 1


LAYOUTS = ("--set", "pipeline.replicas=2", "--set", "pipeline.pipelines=1", "--set", "job.steps=1000")


def test_the_layout_and_the_step_of_each_prefix_are_told(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas in one pipeline of four ranks; with most layers frozen, shorter pipelines run them side by side."""
    asked = (*LAYOUTS, "--set", "freeze.method=pipetransformer")
    assert plan(job, "--json", *asked) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == KEYS | {"layouts"}
    rows = told["layouts"]
    assert [row["frozen"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert (rows[0]["pipelines"], rows[0]["replicas"], rows[0]["unpacked_step_s"]) == (
        1,
        2,
        pytest.approx(told["predicted_step_s"]),
    )
    assert rows[-1]["pipelines"] == 2
    for row in rows:
        assert row["pipelines"] * row["ranks"] <= 4
        assert [first for first, _ in row["partition"]] == [0, *(stop for _, stop in row["partition"][:-1])]
        assert row["partition"][-1][1] == 6
        assert row["predicted_step_s"] <= row["unpacked_step_s"] * (1 + 1e-9)
    steps = [row["unpacked_step_s"] for row in rows]
    assert steps == sorted(steps, reverse=True), "a frozen layer has no backward pass"
    assert plan(job, *asked) == DONE
    shown = capsys.readouterr().out
    assert "pipelines once layers are frozen (freeze.pack)" in shown
    best = rows[0]["unpacked_step_s"] / rows[-1]["predicted_step_s"]
    assert f"{best:.2f} x" in shown


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [
        (("freeze.method=prefix", "freeze.schedule=[[10,2],[20,4],[30,0]]"), [0, 2, 4]),
        (("freeze.method=pipetransformer", "freeze.pack=off"), None),
        (("freeze.method=timelyfreeze",), None),
    ],
)
def test_only_prefixes_that_the_job_may_come_to_have_a_layout(
    job: Path, capsys: pytest.CaptureFixture[str], freeze: tuple[str, ...], frozen: list[int] | None
) -> None:
    assert plan(job, "--json", *LAYOUTS, *(part for each in freeze for part in ("--set", each))) == DONE
    rows = json.loads(capsys.readouterr().out).get("layouts")
    assert (None if rows is None else [row["frozen"] for row in rows]) == frozen


def test_people_get_tables_and_reasons(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(job, "--set", "pipeline.partition=time", *TIMELY) == DONE
    told = capsys.readouterr().out
    assert "1f1b: 4 stages on 4 ranks, 4 microbatches" in told
    assert "6 layers cut by time; a step is predicted to take" in told
    assert "profile: made by hand" in told
    assert "by eq. 50 of TimelyFreeze); percent of weight-gradient time frozen" in told
    assert "DynPipe's Algorithm 1: 1 stage on 4 devices, W(S) = 33.9 ms per microbatch" in told
    assert "stage 3" in told
    assert "limit: rank" in told
    assert re.search(r"rank 3 memory peak \S+ kB: optimizer \S+ kB, ", told)
    # Stage 3 has the last block and the head: 14 ms of weight gradients for each of 4 microbatches.
    assert "limit: r_max on stage 3: 0.01 more would shorten the window by 560 µs" in told


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_the_timeline_takes_the_form_of_its_suffix(job: Path, suffix: str) -> None:
    assert plan(job, "--timeline", f"step.{suffix}", *TIMELY) == DONE
    text = Path(f"step.{suffix}").read_text()
    if suffix == "json":
        names = {event["name"] for event in json.loads(text)["traceEvents"]}
        assert {"0F0", "3B3", "process_name", "rank 3 memory"} <= names
    elif suffix == "svg":
        assert text.count("<svg") == 1
        assert text.count('class="room"') == 4
    else:
        page = Page(text)
        assert [len(group["lanes"]) for each in page.timelines for group in each["groups"]] == [4, 4]
        assert all("memory" in lane for each in page.timelines for lane in each["groups"][0]["lanes"])
        assert page.text.count("Idle time by cause, predicted") == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--timeline", "step.png"), "--timeline step.png: the suffix says the form, use one of .svg"),
        (("--set", "model.layers=5"), "another model's profile"),
        (("--set", "job.precision=bfloat16"), 'the profile was made with job.precision = "float32"'),
        (("--set", "pipeline.ranks=6"), "the profile has 4 devices"),
        (("--set", "cluster.memory_per_rank_bytes=100"), "no plan: "),
        (("--profile", "nowhere.json"), "cannot read the profile nowhere.json"),
        (("--profile", "tiny.toml"), "tiny.toml is not JSON"),
        (("--target-error", "1"), "--target-error needs --estimates"),
        (("--set", "freeze.r_max=2"), "freeze.r_max = 2: should be less than or equal to 1"),
    ],
)
def test_a_mistake_is_one_message(
    job: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert plan(job, *options) == USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("freshet: ")
    assert told in error


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The events of a job whose first loss is 2, with L = 3 and xi^2 = 5."""
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    events.append(Record(time_s=0.0, event=Issued(plan=replace(issued_plan(), stage_ranks=(0, 1, 0, 1)))))
    events.append(Record(time_s=1.0, event=replace(step_report(1, Random(1)), loss=2.0)))
    for rank in (0, 1):
        events.append(
            Record(
                time_s=2.0,
                event=CurvatureReport(
                    step=3, rank=rank, gradient_change_sq=4.5, weight_change_sq=0.5, gradient_sq=2.5
                ),
            )
        )
    events.close()
    return path


def test_estimates_tell_how_many_updates(job: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--estimates", str(log), "--target-error", "0.1", "--set", "optimizer.lr=0.01")
    assert plan(job, "--json", *options) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == KEYS | {"convergence"}
    found = told["convergence"]
    assert found["smoothness"] == pytest.approx(3)
    assert found["second_moment"] == pytest.approx(5)
    assert found["steps"] == 4000  # 2 f(w0) / (eta epsilon)
    assert found["wall_clock_s"] == pytest.approx(4000 * told["predicted_step_s"])
    stale = found["asynchronous"]
    left = 0.1 - 2 * 0.01**2 * stale["stages"] ** 3 * 3**2 * 5
    assert stale["updates"] == math.ceil(2 * 2.0 / (0.01 * left))
    # Both count samples: either kind of update takes all microbatches of a step.
    per_update = stale["microbatches_per_update"]
    assert per_update == told["microbatches"]
    assert found["samples"] / found["steps"] == stale["samples"] / stale["updates"] >= per_update
    assert stale["wall_clock_s"] == pytest.approx(stale["updates"] * per_update * stale["iteration_s"])
    assert plan(job, *options) == DONE
    text = capsys.readouterr().out
    assert "(L = 3.00, ξ² = 5.00): T = 4,000 steps of " in text
    assert (
        f"T(S) x W(S) = {stale['updates']:,} updates of as many samples x {per_update} microbatches x "
        in text
    )
    assert "with stashed weights in memory; no engine here runs it yet" in text


def test_a_target_that_no_asynchronous_pipeline_reaches_is_told(
    job: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(job, "--estimates", str(log), "--target-error", "0.001", "--set", "optimizer.lr=0.01") == DONE
    assert (
        "asynchronous: a target error of 0.001 is out of reach with 1 asynchronous stage"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (4, (), "needs --target-error"),
        (4, ("--target-error", "-1"), "target = -1.0: must be a finite number above 0"),
        (4, ("--target-error", "1", "--set", "optimizer.lr=0.5"), "the theorem needs eta L <= 1"),
        (3, ("--target-error", "1"), "--set job.curvature_every=1"),
        (0, ("--target-error", "1"), "--set job.curvature_every=1"),
    ],
)
def test_estimates_that_cannot_be_had_are_one_message(
    job: Path,
    log: Path,
    lines: int,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.write_text("".join(f"{line}\n" for line in log.read_text().splitlines()[:lines]))
    assert plan(job, "--estimates", str(log), *options) == USER_ERROR
    assert message in capsys.readouterr().err
