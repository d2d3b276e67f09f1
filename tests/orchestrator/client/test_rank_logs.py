"""Ranks' output is shown completely, in order, and while it grows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here

from orchestrator.cli import logs
from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.client import asking
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import NoSuchJob
from orchestrator.client.rank_logs import JobLogs, RankLog, output_end
from orchestrator.cluster.connection import Connection
from orchestrator.events.log import EventLog
from orchestrator.events.types import Event, Finished, Record, Submitted
from orchestrator.history.job_view import JobView
from workers.process.output import older_part, rank_log_path
from workers.protocol.errors import JobError


def written(output: Path, rank: int, text: str) -> Path:
    path = rank_log_path(str(output), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def put(run: Path, *told: Event) -> None:
    log = EventLog(run / "events.jsonl")
    for event in told:
        log.append(Record(time_s=0.0, event=event))
    log.close()


START = Submitted(job="a", epoch=1, spec={}, resume=False)
END = Finished(step=1, stopped=False, state_sha256=None)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = written(tmp_path, 0, "one\ntw")
    log = RankLog(path)
    assert log.fresh() == ["one"]
    assert log.fresh() == []
    written(tmp_path, 0, "o\nthree\nfo")
    assert log.fresh() == ["two", "three"]
    assert log.rest() == ["fo"]
    assert log.rest() == []


def test_nothing_is_lost_where_the_process_turns_to_a_new_file(tmp_path: Path) -> None:
    path = written(tmp_path, 0, "new\n")
    older_part(path).write_text("old\n")
    log = RankLog(path)
    assert log.fresh() == ["old", "new"]
    written(tmp_path, 0, "last of it\nha")
    path.replace(older_part(path))
    written(tmp_path, 0, "lf\nnext\n")
    assert log.fresh() == ["last of it", "half", "next"]
    path.replace(older_part(path))
    assert log.fresh() == []
    written(tmp_path, 0, "after a pause\n")
    assert log.fresh() == ["after a pause"]


def test_ranks_that_come_later_are_shown_too(tmp_path: Path) -> None:
    written(tmp_path, 0, "a\n")
    of_all = JobLogs(str(tmp_path))
    assert list(of_all.fresh()) == [(0, "a")]
    written(tmp_path, 10, "c\n")
    written(tmp_path, 2, "b\n")
    assert list(of_all.fresh()) == [(2, "b"), (10, "c")]


def test_the_command_says_whose_a_line_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 0, "zero\n")
    written(tmp_path, 1, "one\n")
    assert freshet_here("logs", str(tmp_path)) == DONE
    assert capsys.readouterr().out == "rank 0: zero\nrank 1: one\n"
    assert freshet_here("logs", str(tmp_path), "--rank", "1") == DONE
    assert capsys.readouterr().out == "one\n"


def test_following_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 0, "one\n")
    put(tmp_path, START)
    lines: list[str] = []
    looks: list[Any] = [lambda: written(tmp_path, 0, "two\nthr"), lambda: put(tmp_path, END)]
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: looks.pop(0)())
    logs.logs_command(str(tmp_path), "auto", None, follow=True, show=lines.append)
    assert looks == []
    assert lines == ["one", "two", "thr"]


def test_a_rank_without_output_is_an_error_that_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freshet_here("logs", str(tmp_path)) == USER_ERROR
    assert "holds no rank's output: each rank writes it on its own node" in capsys.readouterr().err
    for rank in (0, 2):
        written(tmp_path, rank, "x\n")
    assert freshet_here("logs", str(tmp_path), "--rank", "1") == USER_ERROR
    assert "holds no output of rank 1; it has 0, 2" in capsys.readouterr().err


def test_a_job_by_name_is_looked_for_in_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(client: BlockingJobClient, job: str) -> JobView:
        if job != "a":
            raise NoSuchJob("no such job")
        return JobView(spec={"job": {"output": str(tmp_path)}})

    monkeypatch.setattr(asking, "joined", lambda address: nullcontext(Connection(set(), address)))
    monkeypatch.setattr(BlockingJobClient, "view", answer)
    assert logs.folder_of("a", "auto") == str(tmp_path)
    with pytest.raises(JobError, match="there is no folder b, nor runs/b, and no job 'b' is running at auto"):
        logs.folder_of("b", "auto")


def test_the_end_of_an_output_comes_from_both_parts_and_as_a_terminal_would_show_it(tmp_path: Path) -> None:
    assert output_end(str(tmp_path), 0, 100) is None
    path = written(tmp_path, 0, "three\nfour")
    older_part(path).write_text("one\ntwo\n")
    for most, text, cut in (
        (100, "one\ntwo\nthree\nfour", False),
        (15, "two\nthree\nfour", True),
        (4, "four", True),
    ):
        found = output_end(str(tmp_path), 0, most)
        assert found is not None
        assert (found.text, found.cut) == (text, cut)
    odd = b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07\n 10%\r 50%\r100%\r\n\x00\xff\ttab <b>"
    rank_log_path(str(tmp_path), 1).write_bytes(odd)
    found = output_end(str(tmp_path), 1, 100)
    assert found is not None
    assert found.text == "red \n100%\n\ufffd\ufffd\ttab <b>"
