"""Commands that need no job: what they refuse, what they write, and the order in which help lists them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest
from command_line import freshet_here
from elastic_run import SPEC, ElasticRun, eventful
from safetensors.numpy import save_file
from synthetic_run import records
from tiny_jobs import write_spec

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.cli.exporting import check_target
from orchestrator.cli.jobs import status_line
from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.history.job_view import fold
from workers.protocol.errors import JobError


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The folder of a job whose controller was killed while it wrote a line."""
    run = tmp_path / "run"
    log = EventLog(run / "events.jsonl")
    for record in records(steps=20):
        if not isinstance(record.event, events.Finished):
            log.append(record)
    log.close()
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time_s": 1, "kind": "st')
    return run


def test_help_lists_the_commands_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("--help") == DONE
    told = capsys.readouterr().out
    places = [told.index(f" {name} ") for name in ("train", "plan", "profile", "status", "follow", "report")]
    assert places == sorted(places)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("--version") == DONE
    assert capsys.readouterr().out.startswith("freshet")


def test_a_report_is_written_from_the_log_of_a_crashed_run(
    crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freshet_here("report", str(crashed)) == DONE
    assert capsys.readouterr().out == f"report: {crashed / 'report.html'}\n"
    assert (crashed / "report.html").read_text().startswith("<!doctype html>")
    assert freshet_here("report", str(crashed), "--out", str(crashed / "other.html")) == DONE
    assert (crashed / "other.html").exists()


def test_status_says_why_nobody_leads_a_job() -> None:
    view = fold(records(steps=20)[:-1])
    line = status_line("a", view)
    assert line.startswith(f"a: training, step {view.step} of ")
    assert "ranks " in line
    assert ";" not in line
    view.trouble = "JobError: another run is at work"
    assert status_line("a", view) == f"{line}; JobError: another run is at work"


def test_status_counts_the_ranks_that_wait_for_resources_or_start() -> None:
    run = ElasticRun()
    run.submit()
    run.put(events.Placing(ranks=(0, 1, 2)))
    assert ": starting, step 0 of 1000, 3 ranks starting or without resources, " in status_line(
        "a", fold(run.records)
    )
    run.rank(0)
    run.put(events.RankFailed(rank=1, error="did not start"))
    assert ", ranks 0, 1 rank starting or without resources, " in status_line("a", fold(run.records))
    run.put(events.Submitted(job="elastic", epoch=2, spec=SPEC, resume=False, takeover=True))
    assert "without resources" not in status_line("a", fold(run.records)), "the next controller ends it"


def test_status_names_the_ranks_that_are_there_after_replacements() -> None:
    run = eventful()
    assert {2, 3, 4} <= set(fold(run.records).recovery.homes)
    assert "ranks 3, 4, " in status_line("a", fold(run.records[:-1]))


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("report", str(tmp_path)) == USER_ERROR
    assert "holds no event log: name a job's output folder" in capsys.readouterr().err


def test_export_does_not_replace_what_holds_no_tensors(tmp_path: Path) -> None:
    spec, old = write_spec(tmp_path, "a"), tmp_path / "old.safetensors"
    save_file({"x": numpy.zeros(2)}, old)
    before = spec.read_bytes()
    assert freshet_here("export", str(tmp_path), "--out", str(spec)) == USER_ERROR
    assert spec.read_bytes() == before
    with pytest.raises(JobError, match=r"exists and is no safetensors file: .*--force"):
        check_target(spec, force=False)
    check_target(spec, force=True)
    check_target(old, force=False)
    check_target(tmp_path / "new", force=False)


def test_export_writes_into_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path(os.devnull), tmp_path):
        with pytest.raises(JobError, match="is no regular file: name a file to write"):
            check_target(target, force=True)


@pytest.mark.parametrize("address", ["nonsense", ""])
def test_an_address_that_is_none_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("status", "--address", address) == USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"freshet: cluster.address = '{address}' is no address: use ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("key", ["model.factory", "data.source"])
def test_a_factory_that_exits_ends_no_job_as_done(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"exits_for_{key.replace('.', '_')}"
    (tmp_path / f"{module}.py").write_text("import sys\n\n\ndef build():\n    sys.exit(0)\n")
    spec = tmp_path / "job.toml"
    spec.write_text(f'[job]\nname = "exits"\noutput = "{tmp_path / "run"}"\n[model]\n[data]\n')
    chosen = {"model.factory": ("data.source=digits",), "data.source": ("model.family=gpt",)}[key]
    overrides = (f"{key}={module}:build", *chosen)
    given = [part for override in overrides for part in ("--set", override)]
    assert freshet_here("train", str(spec), *given) == USER_ERROR
    told = capsys.readouterr().err
    assert f"{key} = '{module}:build': the function called sys.exit(0)" in told
    assert f"{tmp_path / module}.py:5 in build" in told
