"""A `freshet fault` request is checked, and refused with a message, before anything is injected."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import typer.main
from command_line import freshet_here
from rich.console import Console
from typer.core import TyperGroup

from orchestrator.cli.commands.steer.fault import drill_of
from orchestrator.cli.exit_codes import USER_ERROR
from orchestrator.cli.main import app
from orchestrator.cli.text.progress import LineProgress
from orchestrator.cli.text.training_lines import TrainingLines
from orchestrator.cluster.placement import Node
from orchestrator.controller.inject_faults import check_step, choose_node, choose_rank, inject, when
from orchestrator.events.reports import report_sentence
from orchestrator.events.types import Record
from orchestrator.history.job_view import fold
from orchestrator.history.notes import Note
from workers.fault_injection.drill import Drill
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.errors import JobError
from workers.protocol.reports import FaultReport

KILL = Fault(kind=FaultKind.KILL)
NODES = tuple(Node(id=id, host=host, total={}, available={}) for id, host in (("ab12", "h1"), ("ab99", "h2")))


def test_it_travels_as_json() -> None:
    for drill in (
        Drill(rank=2, fault=Fault(kind=FaultKind.SLOW, factor=2.0, steps=10)),
        Drill(node="ab", deadline_s=60.0),
    ):
        assert Drill.from_json(json.loads(json.dumps(drill.to_json()))) == drill


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "a fault or a node"),
        ({"rank": 1, "fault": {"kind": "kill"}, "node": "ab"}, "a fault or a node"),
        ({"rank": 1, "node": "ab"}, "not both"),
        ({"rank": -1, "fault": {"kind": "kill"}}, "rank"),
        ({"rank": 1, "fault": {"kind": "stop"}}, "stop needs seconds"),
        ({"rank": 1, "fault": {"kind": "explode"}}, "fault.kind"),
        ({"rank": 1, "fault": {"kind": "kill"}, "force": True}, "force"),
        ({"node": "ab", "deadline_s": float("inf")}, "finite"),
    ],
)
def test_what_is_no_drill_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        Drill.from_json(values)
    assert said in str(error.value)


def test_a_rank_that_is_not_there_is_told_with_those_that_are() -> None:
    assert choose_rank(Drill(rank=4, fault=KILL), (0, 2, 4)) == 4
    with pytest.raises(JobError, match="no rank 1; it has 0, 2, 4"):
        choose_rank(Drill(rank=1, fault=KILL), (0, 2, 4))
    with pytest.raises(JobError, match="it has none"):
        choose_rank(Drill(rank=1, fault=KILL), ())


def test_only_a_checkpoint_is_corrupted_by_whoever_is_there() -> None:
    assert choose_rank(Drill(fault=Fault(kind=FaultKind.CORRUPT_CHECKPOINT)), (3, 5)) == 3
    with pytest.raises(JobError, match="kill of which rank"):
        choose_rank(Drill(fault=KILL), (3, 5))


def test_a_step_that_is_past_is_refused() -> None:
    check_step(KILL, 40)
    check_step(Fault(kind=FaultKind.KILL, step=41), 40)
    with pytest.raises(JobError, match="step 40 is past: the job has committed 40"):
        check_step(Fault(kind=FaultKind.KILL, step=40), 40)


@pytest.mark.parametrize(("name", "id"), [("ab1", "ab12"), ("ab99", "ab99"), ("h1", "ab12")])
def test_a_node_is_named_by_its_id_the_beginning_of_it_or_its_host(name: str, id: str) -> None:
    assert choose_node(name, NODES).id == id


@pytest.mark.parametrize(
    ("name", "living", "said"),
    [
        ("h3", NODES, "no node 'h3'; it has ab12 (h1), ab99 (h2)"),
        ("", NODES, "no node ''"),
        ("ab", NODES, "more than one"),
        ("h1", NODES[:1], "the only node"),
    ],
)
def test_a_node_that_cannot_be_drained_is_refused(name: str, living: tuple[Node, ...], said: str) -> None:
    with pytest.raises(JobError) as error:
        choose_node(name, living)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (KILL, "now"),
        (Fault(kind=FaultKind.KILL, after_s=2.5), "after 2.5 s"),
        (Fault(kind=FaultKind.KILL, step=7, phase=FaultPhase.IN_COMMIT), "in phase in-commit of step 7"),
        (Fault(kind=FaultKind.KILL, step=7), "in the first phase of step 7"),
        (Fault(kind=FaultKind.NAN), "in phase backward of the next step"),
    ],
)
def test_it_says_when_the_fault_fires(fault: Fault, said: str) -> None:
    assert when(fault) == said


def test_a_fault_in_words() -> None:
    report = FaultReport(rank=2, fault="stop for 5 s", step=40, phase="in-commit", fired_s=0.0)
    assert report_sentence(report) == "injected fault: stop for 5 s on rank 2 in phase in-commit of step 40"
    assert report_sentence(replace(report, phase="")) == "injected fault: stop for 5 s on rank 2"
    corrupted = replace(report, fault="corrupt-checkpoint", phase="", file="runs/a/x.safetensors")
    said = "injected fault: corrupt-checkpoint changes a bit of runs/a/x.safetensors, by rank 2"
    assert report_sentence(corrupted) == said
    (note,) = fold([Record(time_s=0.0, event=report)]).notes
    assert note == Note("note", "Injected fault: stop for 5 s on rank 2 in phase in-commit of step 40.")
    console = Console(file=StringIO(), width=200)
    TrainingLines(LineProgress(console, 100))(Record(time_s=0.0, event=report))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == f"warning: {report_sentence(report)}\n"


@pytest.mark.parametrize(
    ("words", "drill"),
    [
        (
            "kill --rank 2 --step 40 --phase backward",
            Drill(rank=2, fault=Fault(kind=FaultKind.KILL, step=40, phase=FaultPhase.BACKWARD)),
        ),
        ("stop --rank 0 --seconds 5", Drill(rank=0, fault=Fault(kind=FaultKind.STOP, seconds=5))),
        (
            "slow --rank 1 --factor 2 --steps 10",
            Drill(rank=1, fault=Fault(kind=FaultKind.SLOW, factor=2, steps=10)),
        ),
        (
            "throttle-link --rank 1 --bytes-per-s 1e6 --after 3",
            Drill(rank=1, fault=Fault(kind=FaultKind.THROTTLE_LINK, bytes_per_s=1e6, after_s=3)),
        ),
        (
            "oom --rank 1 --limit-bytes 1000000 --steps 4",
            Drill(rank=1, fault=Fault(kind=FaultKind.OOM, limit_bytes=1_000_000, steps=4)),
        ),
        ("fill-disk --rank 1 --times 4", Drill(rank=1, fault=Fault(kind=FaultKind.FILL_DISK, times=4))),
        ("corrupt-checkpoint", Drill(fault=Fault(kind=FaultKind.CORRUPT_CHECKPOINT))),
        ("drain --rank 3", Drill(rank=3, fault=Fault(kind=FaultKind.DRAIN, seconds=30))),
        (
            "drain --rank 3 --deadline 5 --step 9",
            Drill(rank=3, fault=Fault(kind=FaultKind.DRAIN, seconds=5, step=9)),
        ),
        ("drain --node ab12 --deadline 5", Drill(node="ab12", deadline_s=5)),
    ],
)
def test_the_command_asks_for_what_its_words_say(words: str, drill: Drill) -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    options = command.commands["fault"].make_context("fault", ["job", *words.split()]).params
    for shared in ("job", "address", "id", "as_json"):
        options.pop(shared)
    assert drill_of(**options) == drill


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("kill --rank 2 --node ab12", "only drain does"),
        ("kill --rank 2 --deadline 3", "only drain does"),
        ("kill --rank 2 --seconds 3", "kill takes no seconds"),
        ("stop --rank 2", "stop needs seconds"),
        ("drain --rank 2 --node ab12", "not both"),
        ("drain --node ab12 --step 4", "drained at once"),
        ("nan --rank 2 --phase saving", "leave the phase out"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freshet_here("fault", "job", *words.split()) == USER_ERROR
    assert said in capsys.readouterr().err


def test_a_cluster_of_a_job_of_its_own_cannot_be_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("fault", "job", "kill", "--rank", "0", "--address", "local") == USER_ERROR
    assert "a local cluster belongs to its own" in capsys.readouterr().err


def test_a_job_that_allows_no_faults_is_left_alone() -> None:
    with pytest.raises(JobError) as error:
        asyncio.run(inject("calm", False, 3, {"rank": 0, "fault": {"kind": "kill"}}))
    assert str(error.value) == "job 'calm' allows no faults: start it with elastic.allow_faults = true"
