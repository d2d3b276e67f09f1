import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from orchestrator.cli.commands.start.schedule import schedule
from planner.schedule.registry import build
from planner.schedule.table_format import dump, parse


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(schedule)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "TERM": "dumb"})


def summary(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_numbers_and_picture():
    result = run("1f1b", "--ranks", "4", "--microbatches", "8")
    assert result.exit_code == 0
    out = result.stdout
    assert "1f1b: 4 stages on 4 ranks, 8 microbatches, makespan 33 s, bubble 27.3%" in out
    assert "rank 3" in out
    assert "3B7" in out
    assert "F  forward   B  backward  · bubble" in out


def test_json():
    got = summary("1f1b", "--ranks", "2", "--microbatches", "2")
    timeline = got.pop("timeline")
    assert got == {
        "schedule": "1f1b",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "stage_ranks": [0, 1],
        "makespan_s": 9.0,
        "bubble": [3 / 9, 3 / 9],
        "in_flight": [2, 1],
        "in_flight_input_grad": [2, 1],
    }
    assert timeline[1][0] == {"action": "1F0", "start_s": 1.0, "end_s": 2.0}


def test_costs_are_taken():
    arguments = ("gpipe", "--ranks", "2", "--microbatches", "3", "--f", "2", "--i", "3", "--w", "5")
    assert summary(*arguments)["makespan_s"] == (3 + 1) * (2 + 3 + 5)
    assert summary(*arguments, "--comm", "0.5")["makespan_s"] == 41.0


def test_chunks_are_taken():
    got = summary("interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    assert got["makespan_s"] == 3 * 4 * 3 + 3
    assert got["stage_ranks"] == [0, 1, 0, 1, 0, 1]


def test_csv_and_svg_are_written(tmp_path: Path):
    table, picture = tmp_path / "zbv.csv", tmp_path / "zbv.svg"
    assert (
        run(
            "zbv", "--ranks", "2", "--microbatches", "4", "--csv", str(table), "--svg", str(picture)
        ).exit_code
        == 0
    )
    assert parse(table.read_text(), "zbv") == build("zbv", 2, 4)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_table_of_ones_own(tmp_path: Path):
    table = tmp_path / "my.csv"
    table.write_text(dump(build("zb-h1", 3, 6)))
    got = summary(f"csv:{table}")
    assert (got["ranks"], got["microbatches"], got["makespan_s"]) == (3, 6, 3 * 6 + 2)
    assert summary(f"csv:{table}", "--ranks", "3", "--microbatches", "6")["schedule"] == f"csv:{table}"


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", "--ranks", "2", "--microbatches", "2"), "unknown schedule '1f2b', did you mean '1f1b'?"),
        (("1f1b",), "1f1b needs --ranks and --microbatches, such as --ranks 4 --microbatches 8"),
        (("1f1b", "--ranks", "2"), "1f1b needs --microbatches, such as"),
        (("interleaved", "--ranks", "4", "--microbatches", "6"), "needs a multiple of the ranks: use 4 or 8"),
        (("1f1b", "--ranks", "0", "--microbatches", "6"), "ranks = 0, must be at least 1"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--f", "-1"), "--f -1.0: must be a number of sec"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--comm", "nan"), "--comm nan: must be a number"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--w", "inf"), "--w inf: must be a number"),
        (
            ("1f1b", "--ranks", "2", "--microbatches", "2", "--f", "0", "--i", "0", "--w", "0"),
            "--f, --i and --w are all 0",
        ),
        (("csv:missing.csv",), "missing.csv: No such file or directory"),
        (("csv:missing.csv", "--chunks", "2"), "--chunks does not go with csv:PATH"),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments: tuple[str, ...], message: str):
    assert message in refused(*arguments)


def test_a_wrong_table_is_refused_with_its_place(tmp_path: Path):
    table = tmp_path / "bad.csv"
    table.write_text("0F0,0B0\n,1F0,1F0,1B0\n")
    error = refused(f"csv:{table}")
    assert f"row 2, column 3: csv:{table}: rank 1, position 1, 1F0: doubled" in error
    assert ">1F0<" in error
    table.write_text("0F0,0B0\n,1F0,1B0\n")
    assert "the table has 2 ranks (rows), and the job has 3" in refused(f"csv:{table}", "--ranks", "3")
    table.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(f"csv:{table}")
    assert "Is a directory" in refused(f"csv:{tmp_path}")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    target = tmp_path / "no" / "such.svg"
    error = refused("gpipe", "--ranks", "1", "--microbatches", "1", "--svg", str(target))
    assert f"{target}: No such file or directory" in error
