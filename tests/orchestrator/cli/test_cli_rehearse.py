"""`freshet rehearse`: how options change a trace and a spec, and what it refuses before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_run import eventful, life, rehearse
from tiny_jobs import tiny, write_spec
from typer.testing import CliRunner

from orchestrator.analysis.effective_time import effective_time
from orchestrator.cli.exit_codes import INTERRUPTED, USER_ERROR
from orchestrator.cli.main import app
from orchestrator.cli.rehearsing import RehearsalOptions, performance_of
from orchestrator.events.rehearsed import CopiesSaved
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import fold
from orchestrator.rehearsal.rehearsal import Performance, node_resources, on_nodes
from orchestrator.report.rehearsal_text import lines
from workers.protocol.errors import JobError


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RehearsalOptions:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "".join(f"0,add,n{number}\n" for number in range(8)) + "60000,remove,n2\n120000,remove,n0\n"
    )
    return RehearsalOptions(spec=tmp_path / "a.toml", trace=trace)


def test_a_trace_is_cut_to_as_many_slots_as_the_job_has_ranks(
    options: RehearsalOptions, tmp_path: Path
) -> None:
    done = performance_of(options, tiny(tmp_path, "a"))
    assert done.trace.at_start() == ("n0", "n2", "n4", "n6")
    assert (done.ranks, done.trace.losses, done.speedup, done.grace_s) == (4, 2, None, None)
    assert done.source == "trace.csv, 4 nodes"
    assert done.spec.job.output == "runs/a-rehearsal"
    more = replace(options, nodes=6, ranks=5, window="1-2", speedup=3.0, grace="30", out=tmp_path / "o")
    done = performance_of(more, tiny(tmp_path, "a"))
    # Slots 0, 1, 2, 4, 5, 6 of eight; n2 leaves at the start of the window.
    assert done.trace.at_start() == ("n0", "n1", "n4", "n5", "n6")
    assert (done.ranks, done.trace.losses, done.trace.end_ms, done.grace_s) == (5, 1, 60000, 30)
    assert done.source == "trace.csv, minutes 1-2, 5 nodes"
    assert done.spec.job.output == str(tmp_path / "o")


def test_a_folder_that_is_set_is_the_rehearsals(options: RehearsalOptions, tmp_path: Path) -> None:
    spec = tiny(tmp_path, "a")
    there = replace(options, overrides=(f"job.output={spec.job.output}",))
    assert performance_of(there, spec).spec.job.output == spec.job.output


def test_a_synthetic_trace_is_as_long_as_asked(options: RehearsalOptions, tmp_path: Path) -> None:
    made = replace(options, trace=None, synthetic="1:10:5", seed=4)
    done = performance_of(made, tiny(tmp_path, "a"))
    assert (done.trace.most, done.trace.end_ms, done.trace.losses) == (4, 3_600_000, 4 * 6)
    assert done.source == "synthetic 1:10:5, seed 4, 4 nodes"
    assert performance_of(replace(made, window="0-25"), tiny(tmp_path, "a")).trace.end_ms == 1_500_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace": None}, "either --trace FILE or --synthetic"),
        ({"synthetic": "0.1:10"}, "either --trace FILE or --synthetic"),
        ({"trace": Path("none.csv")}, "cannot read --trace none.csv"),
        ({"nodes": 9}, "--nodes 9: the trace has between 1 and 8"),
        ({"ranks": 5}, "--ranks 5: the trace has at most 4 nodes"),
        ({"speedup": 0.0}, "--speedup 0"),
        ({"speedup": float("nan")}, "--speedup nan"),
        ({"grace": "soon"}, "--grace soon"),
        ({"grace": "-1"}, "--grace -1"),
        ({"window": "5"}, "--window 5: expected A-B"),
        ({"window": "1-3"}, "the trace goes from minute 0 to 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: RehearsalOptions, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError) as refused:
        performance_of(replace(options, **change), tiny(tmp_path, "a"))
    assert said in str(refused.value)


def test_ranks_must_fill_the_replicas(options: RehearsalOptions, tmp_path: Path) -> None:
    spec = tiny(tmp_path, "a", pipeline={"replicas": 2, "ranks": 4})
    with pytest.raises(JobError, match=r"--ranks 3 is no multiple of pipeline\.replicas = 2"):
        performance_of(replace(options, ranks=3), spec)


def test_a_bad_trace_is_a_users_error(options: RehearsalOptions, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n5,remove,b\n")
    command = ["rehearse", str(write_spec(tmp_path, "a")), "--trace", str(options.trace)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, JobError)
    assert "line 2: node b is removed, but it was never added" in str(result.exception)
    assert USER_ERROR == 2


def test_the_commands_of_the_guide_can_be_typed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, begun = Path(__file__).parents[3], list[Performance]()
    commands = [
        line.split()[1:]
        for line in (root / "docs" / "guides" / "rehearsals.md").read_text().splitlines()
        if line.startswith("freshet rehearse ") and "p3-trace.csv" not in line  # not in the repository
    ]
    assert len(commands) == 2
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)

    def begin(performance: Performance, **observers: object) -> None:
        begun.append(performance)
        raise JobError("it would begin here")

    monkeypatch.setattr("orchestrator.cli.rehearsing.rehearse", begin)
    for command in commands:
        assert str(CliRunner().invoke(app, command).exception) == "it would begin here"
    made, again = begun
    assert made.trace.losses > 0
    assert again.trace.changes == made.trace.changes
    assert (made.grace_s, again.grace_s) == (None, 120)
    assert made.spec.job.output == "runs/gpt-rehearsal"


@pytest.mark.parametrize("begun", [False, True])
def test_a_rehearsal_that_is_interrupted_leaves_its_folder_only_if_its_job_has_begun(
    options: RehearsalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    folder = Path("runs/a-rehearsal")

    def begin(performance: Performance, **observers: object) -> None:
        (folder / "data").mkdir(parents=True)
        if begun:
            JobFolder(str(folder)).claim("a", {})
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.cli.rehearsing.rehearse", begin)
    command = ["rehearse", str(write_spec(tmp_path, "a")), "--trace", str(options.trace)]
    assert CliRunner().invoke(app, command).exit_code == INTERRUPTED
    assert folder.exists() == begun


def test_an_error_names_the_option_that_named_the_folder(options: RehearsalOptions, tmp_path: Path) -> None:
    spec, out = write_spec(tmp_path, "a"), tmp_path / "o"

    def refusal(folder: Path) -> str:
        command = ["rehearse", str(spec), "--trace", str(options.trace), "--out", str(folder)]
        return str(CliRunner().invoke(app, command).exception)

    JobFolder(str(out)).claim("b", {})
    said = f"--out {out} holds another job, 'b', and this one is 'a': choose another --out"
    assert refusal(out) == said
    JobFolder(str(out)).claim("a", {})
    (out / "checkpoints" / "step-00000004-gen-1").mkdir(parents=True)
    assert refusal(out) == f"--out {out} holds a run of 'a' with 0 steps: choose another --out"
    assert refusal(spec / "o") == f"--out {spec / 'o'} cannot be used: Not a directory"


def test_a_rank_takes_a_whole_node(tmp_path: Path) -> None:
    spec = on_nodes(tiny(tmp_path, "a"), "127.0.0.1:5", 7, {"CPU": 1.0})
    assert (spec.pipeline.ranks, spec.cluster.address) == (7, "127.0.0.1:5")
    assert spec.cluster.resources_per_rank == {"CPU": 1.0}
    assert node_resources(tiny(tmp_path, "a", cluster={"device": "cuda"})) == {"CPU": 1.0, "GPU": 1.0}


def test_the_numbers_are_told_in_words() -> None:
    run = eventful()
    lives = (life(0, 990, 1012.9), life(1, 990, 1012.9), life(2, 990, 1004.5), life(3, 990), life(4, 1007))
    saved = tuple(
        CopiesSaved(copies=copies, losses=9, last_holders=last, steps_lost=lost)
        for copies, last, lost in ((0, 9, 70), (1, 2, 1), (2, 0, 0))
    )
    rehearse(run, lives, began_s=1001, ended_s=1022.4, copies=saved)
    found = effective_time(fold(run.records).recovery, emulated=True)
    assert found is not None
    text = "\n".join(lines(found))
    assert text.startswith(
        "effective training time ratio 0.437 at 10 times the trace's speed, emulated devices; at"
    )
    assert "3 nodes lost, 1 node joined; 11 steps committed" in text
    assert "2 steps in flight run again, 6 committed steps lost" in text
    assert "43.7 %  in committed steps" in text
    assert "each failed node cost 10.8 node-seconds" in text
    assert "with up-to-date copies of every layer, the 9 losses of the whole trace would cost:" in text
    assert "no copy    70 committed steps: 9 of them take the last node that holds some layer" in text
    assert "1 copy      1 committed step: 2 of them" in text
    assert "2 copies     0 committed steps: 0 of them" in text
    assert "total" in text
    numbers = found.to_dict()
    assert numbers["live_node_seconds"] == pytest.approx(64.1)
    assert numbers["costs"][0]["parts_s"]["detect"] == 0.1
