"""Every command on one job of a real Ray cluster, over the service beside it and, for some, over Ray: each is logged
once with who sent it, and the job's bits are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from command_line import freshet_here
from ray.cluster_utils import Cluster
from ray_jobs import assert_nothing_left, driver_of, job_of
from ray_nodes import add_node, start_head
from serving import served, token
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from dashboard.service.settings import ServiceSettings
from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.client.access_token import TOKEN, TOKEN_FILE
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.errors import CommandIdReused, NoSuchJob, PlanChanged, Refused
from orchestrator.client.opening import ADDRESS, opened
from orchestrator.client.rest_client import RestJobClient
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.events.types import Record
from orchestrator.spec.job_spec import Spec
from workers.protocol.reports import StepReport

Kind = TypeVar("Kind")
JOB = "mine"
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "rest.md").read_text()
SENDER = "control from 127.0.0.1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with room for two ranks each."""
    nodes = start_head(2)
    try:
        add_node(nodes, 2)
        with driver_of(nodes):
            yield nodes
            assert_nothing_left()
    finally:
        nodes.shutdown()


@pytest.fixture
def service(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A service of the cluster's jobs, to which commands go unless told otherwise."""
    settings = ServiceSettings(
        tokens=tmp_path / "tokens.json", audit=tmp_path / "audit.jsonl", trust_specs=True, roots=(tmp_path,)
    )
    with served(settings) as address:
        monkeypatch.delenv(TOKEN, raising=False)
        monkeypatch.setenv(TOKEN_FILE, str(settings.tokens))
        monkeypatch.setenv(ADDRESS, address)
        assert token(settings) not in address
        yield address


def long_job(folder: Path, times_s: float, method: str = "timelyfreeze", **pipeline: Any) -> Spec:
    """A job of six layers on two ranks, longer than any test. It would freeze much later."""
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), times_s)
    return tiny(
        folder,
        JOB,
        job={"steps": 100_000, "sample_tokens": 0},
        pipeline={"ranks": 2, "microbatches": 2, "partition": "dynpipe", **pipeline},
        freeze={"method": method, "r_max": 0.8, "warm_up": 50_000, "monitoring": 50_010, "ramp": 60_000},
        elastic={"allow_faults": True},
        cluster={"device": "emulated", "emulated": modelled, "resources_per_rank": {"CPU": 1.0}},
    )


def state_at(folder: Path, step: int) -> str:
    """The state of the same job at `step`, on one rank of this process, undisturbed."""
    spec = long_job(folder, 0.0, "none", ranks=1, partition="parameter")
    return run_threads(replace(job_of(spec), stop_at=step)).state_sha256


class Typed:
    """What the commands print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> str:
        code = freshet_here(*words)
        told = self._capsys.readouterr()
        assert code in (DONE, None), (words, told.err)
        return told.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def refused(self, *words: str) -> str:
        assert freshet_here(*words) == USER_ERROR
        return self._capsys.readouterr().err


def stale_plans(service: str, folder: Path, base: tuple[int, int]) -> list[tuple[int, str]]:
    """(status, the plan to look at) of each way to name an older plan."""
    secret = json.loads((folder / "tokens.json").read_text())["control"]
    found = []
    for headers, body in (({"If-Match": "{}.{}"}, {}), ({}, {"version": "{}.{}"})):
        answer = httpx.post(
            f"{service}/api/v1/jobs/{JOB}/plan",
            headers={"Authorization": f"Bearer {secret}"}
            | {name: value.format(*base) for name, value in headers.items()},
            json={"partition": [3, 3]} | {name: value.format(*base) for name, value in body.items()},
        )
        problem = answer.json()
        assert problem["type"] == "urn:freshet:plan-changed"
        assert f"If-Match: {problem['version']}" in problem["action"]
        found.append((answer.status_code, problem["version"]))
    return found


def logged(folder: Path, kind: type[Kind]) -> list[Kind]:
    return [each.event for each in read_log(folder / "events.jsonl") if isinstance(each.event, kind)]


def guide_lines() -> list[str]:
    """What the guide types after `freshet`, but for the start of a service."""
    lines = re.findall(r"^freshet (.*)$", GUIDE, re.MULTILINE)
    return [line for line in lines if not line.startswith("dashboard")]


def run_block(file: str) -> None:
    """Run a Python block of the guide."""
    (block,) = re.findall(rf"^```python\n# {file}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    exec(compile(block, file, "exec"), {"__name__": file})


def test_every_command_over_rest_and_over_ray(
    service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    freshet, folder = Typed(capsys), tmp_path / JOB
    with opened(service) as client:
        sent = client.submit(long_job(tmp_path, 0.003))
        assert (sent.name, sent.folder) == (JOB, str(folder))
        for record in client.events(JOB):
            if isinstance(record, Record) and isinstance(record.event, StepReport) and record.event.step >= 2:
                break

        # Reads: the same over both.
        for address in (service, "auto"):
            (listed,) = freshet.json("jobs", "--address", address)["jobs"]
            assert (listed["job"], listed["state"], listed["ranks"]) == (JOB, "training", 2)
            assert f"{JOB}: training, step " in freshet("status", "--address", address)
            said = freshet("status", JOB, "--address", address)
            assert "layers per stage" in said
            assert f"folder: {folder}" in said
            assert freshet.json("status", JOB, "--address", address)["nodes"][1]["stages"] == [1]
            lines = freshet("events", JOB, "--json", "--address", address).splitlines()
            assert json.loads(lines[0])["event"] == "Submitted"
            assert [Record.from_json(line).to_json() for line in lines] == lines
            assert "speed" in freshet("jobs", "--address", address)
        assert freshet("events", JOB, "--after", "1").splitlines()[0].startswith("     2  ")
        chosen = freshet("events", JOB, "--kind", "Submitted", "--kind", "regrouped").splitlines()
        assert [line.split()[2] for line in chosen] == ["Submitted"]
        assert "no event 'Regruoped'; did you mean 'Regrouped'" in freshet.refused(
            "events", JOB, "--kind", "Regruoped"
        )
        assert client.profile(JOB) == BlockingJobClient().profile(JOB) is not None
        assert "did you mean 'mine'" in freshet.refused("status", "mime")

        # A control that is sent twice with one id is done once; the id is for no other.
        first = freshet.json("checkpoint", JOB, "--id", "twice")
        assert first["done"]
        assert (folder / "checkpoints").is_dir()
        assert freshet.json("checkpoint", JOB, "--id", "twice") == first
        assert freshet.json("checkpoint", JOB, "--id", "twice", "--address", "auto") == first
        with pytest.raises(CommandIdReused, match="'twice' was used for checkpoint"):
            client.pause(JOB, id="twice")
        assert "checkpoint of step" in freshet("checkpoint", JOB, "--address", "auto", "--id", "ray")

        # A plan: simulated, applied, and refused where it is for an older one.
        proposal = client.propose(JOB)
        assert sum(proposal.partition) == 6
        assert "predicted step" in freshet("plan", "--job", JOB, "--partition", "2,4") + freshet(
            "plan", "--job", JOB, "--partition", "4,2"
        )
        wanted = "2,4" if proposal.current_partition != (2, 4) else "4,2"
        done = freshet.json("plan", "--job", JOB, "--partition", wanted, "--apply", "--wait")
        assert done["answer"]["done"]
        assert done["proposal"]["problem"] is None
        with pytest.raises(PlanChanged) as changed:
            client.apply(JOB, (3, 3), base=proposal.base)
        assert (changed.value.epoch, changed.value.version) == client.propose(JOB).base > proposal.base
        newest = changed.value.epoch, changed.value.version
        assert stale_plans(service, tmp_path, proposal.base) == [(409, "{}.{}".format(*newest))] * 2
        assert "not applied: " in freshet.refused("plan", "--job", JOB, "--partition", "1,2,3", "--apply")

        # Layers move one way over REST and back over Ray.
        edge = int(wanted[0])
        assert freshet.json("move", JOB, "--layers", str(edge), "--to", "0", "--wait")["text"] == "moved"
        assert (
            freshet("move", JOB, "--layers", str(edge), "--to", "1", "--wait", "--address", "auto")
            == "moved\n"
        )

        assert freshet.json("freeze", JOB, "--method", "none", "--wait")["done"]
        assert freshet("scale", JOB, "--ranks", "1", "--wait") == "trains on with 1 rank\n"
        (rank,) = client.view(JOB).ranks.members
        node = client.view(JOB).ranks.nodes[rank]
        assert "has no rank of the job any more" in freshet(
            "drain", JOB, node[:16], "--wait", "--deadline", "60"
        )
        assert client.view(JOB).ranks.nodes[client.view(JOB).ranks.members[0]] != node
        assert "there is no node 'nowhere'" in freshet.refused("drain", JOB, "nowhere")
        assert "node 'nowhere' is not drained" in freshet.refused("undrain", JOB, "nowhere")
        assert f"node {node[:12]} " in freshet("undrain", JOB, node[:16], "--wait")
        # Only there is room for a third rank.
        before = client.view(JOB).events
        assert freshet.json("scale", JOB, "--ranks", "2", "--spares", "1", "--wait")["done"]
        for record in client.events(JOB, after=before):
            assert isinstance(record, Record)
            if isinstance(record.event, events.RankStarted) and record.event.node == node:
                break
        assert freshet("scale", JOB, "--ranks", "1", "--spares", "0", "--wait") == "trains on with 1 rank\n"
        (rank,) = client.view(JOB).ranks.members
        assert freshet.json("fault", JOB, "slow", "--rank", str(rank), "--factor", "1.1", "--steps", "1")[
            "id"
        ]

        # The guide, to the end of the job.
        run_block("steer_mine.py")
        assert f"{JOB} training" in capsys.readouterr().out
        monkeypatch.chdir(tmp_path)
        typed = [shlex.split(line) for line in guide_lines()]
        for words in (["pause", JOB], ["resume", JOB, "--wait"], ["cancel", JOB, "--wait", "--json"]):
            assert words in typed
        for words in typed:
            said = freshet(*words)
            if words == ["pause", JOB]:
                assert said.startswith("paused at step ")
                assert "is paused" in freshet.refused("checkpoint", JOB)
                with pytest.raises(Refused, match="is paused"):
                    asyncio.run(RestJobClient(service).checkpoint(JOB))
            elif words == ["resume", JOB, "--wait"]:
                assert "trains on from step" in said
        assert (tmp_path / "step.svg").exists()
        run_block("read_mine.py")

        # The service still shows how it ended.
        ended = [item for item in client.events(JOB) if isinstance(item, Record)]
        (finished,) = [item.event for item in ended if isinstance(item.event, events.Finished)]
        assert finished.stopped
        assert finished.state_sha256 == state_at(tmp_path / "quiet", finished.step)
        assert f"step {finished.step}, " in freshet("timeline", "--job", JOB)
        assert "holds no timeline of step 1: " in freshet.refused("timeline", "--job", JOB, "--step", "1")
        with pytest.raises(Refused, match="has ended"):
            client.pause(JOB)
        BlockingJobClient().dismiss(JOB)
        with pytest.raises(NoSuchJob):
            client.pause(JOB)

    commands = logged(folder, events.Commanded)
    assert len({command.id for command in commands}) == len(commands)
    over_rest = [command.name for command in commands if command.by == SENDER]
    over_ray = [command.name for command in commands if " on " in command.by]
    assert sorted(over_ray) == ["checkpoint", "move"]
    assert {*over_rest} == {
        "stop",
        "checkpoint",
        "pause",
        "resume",
        "move",
        "plan",
        "scale",
        "drain",
        "undrain",
        "freeze",
        "fault",
    }
    assert len(over_rest) + len(over_ray) == len(commands)
    steps = [report.step for report in logged(folder, StepReport)]
    assert steps == list(range(1, finished.step + 1))
    audited = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {line["caller"] for line in audited} == {SENDER}
    assert (
        json.loads((tmp_path / "tokens.json").read_text())["control"]
        not in (folder / "events.jsonl").read_text()
    )
