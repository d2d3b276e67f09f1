"""A real job: its metrics on Ray's own Prometheus endpoint, and its loggers over a lost controller."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pace import patient
from prometheus_client.parser import text_string_to_metric_families
from ray_jobs import Log, assert_nothing_left, driver_of, kill_controller
from ray_nodes import start_head
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_jobs import tiny

from orchestrator.events import types as events
from orchestrator.telemetry.metrics import BY_NAME
from orchestrator.trainer import PipelineTrainer
from workers.protocol.reports import StepReport

KILLED_AT, STEPS = 8, 16
SLOW = {"device": "emulated", "emulated": {"forward_s": 0.01, "input_grad_s": 0.01, "weight_grad_s": 0.01}}


@pytest.fixture(scope="module")
def head() -> Iterator[None]:
    # Ray passes metrics on every 10 s by default. Here only the controller's end passes them on in time.
    nodes = start_head(2, _system_config={"metrics_report_interval_ms": 60_000})
    try:
        with driver_of(nodes):
            yield
            assert_nothing_left()
    finally:
        nodes.shutdown()


def scraped(job: str) -> dict[str, list[Any]]:
    """Family -> samples of `job` on the endpoint of Ray's agent, once it shows the job's end, twice the same. The
    controller has passed its last metrics on before it ended; the agent takes them in one by one."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline_s = time.monotonic() + patient(10)
    before = None
    while True:
        with urllib.request.urlopen(url, timeout=patient(10)) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {
            family.name: [sample for sample in family.samples if sample.labels.get("job") == job]
            for family in families
            if family.name.startswith("ray_freshet_")
        }
        over = [
            sample.value
            for sample in found.get("ray_freshet_job_state", [])
            if sample.labels["state"] == "finished"
        ]
        if 1.0 in over and found == before:
            return found
        before = found
        assert time.monotonic() < deadline_s, f"not on {url}: {sorted(found)}"
        time.sleep(0.1)


def test_metrics_and_loggers_of_a_real_job(head: None, tmp_path: Path) -> None:
    logging = {"tensorboard": True, "otel": "console"}
    killed: list[int] = []

    def kill(record: events.Record) -> None:
        if isinstance(record.event, StepReport) and record.event.step >= KILLED_AT and not killed:
            killed.append(record.event.step)
            kill_controller("counted")

    log = Log(kill)
    spec = tiny(
        tmp_path,
        "counted",
        job={"steps": STEPS, "sample_tokens": 0},
        pipeline={"ranks": 1},
        checkpoint={"every_steps": 0},
        elastic={"grow": False},
        cluster=SLOW,
        logging=logging,
    )
    PipelineTrainer(spec, observe=log, progress=False).fit()
    assert killed, "the controller was not killed"
    assert [event.takeover for event in log.of(events.Submitted)] == [False, True]
    found = scraped("counted")
    gauges = {
        name: [sample.value for sample in found[f"ray_freshet_{name}"]]
        for name in ("step", "ranks", "last_step")
    }
    assert "ray_freshet_ranks_without_redundancy" not in found, "no alert may tell of a job that has ended"
    assert gauges["step"][-1] == gauges["last_step"][-1] == STEPS
    assert found["ray_freshet_loss"][-1].value == pytest.approx(log.of(StepReport)[-1].loss)
    for name in ("moved_bytes", "moves", "move_seconds", "ranks_lost", "recoveries", "recovery_seconds"):
        assert {sample.value for sample in found[f"ray_freshet_{name}"]} == {0.0}, "there before it counts"
    tokens = max(sample.value for sample in found["ray_freshet_tokens"])
    assert tokens == sum(event.tokens for event in log.of(StepReport))
    assert {name.removeprefix("ray_").removesuffix("_total") for name in found} <= {
        name.removesuffix("_total") for name in BY_NAME
    }

    seen = EventAccumulator(str(tmp_path / "counted" / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    steps = [point.step for point in seen.Scalars("loss")]
    assert steps == sorted(set(steps)), "no step twice"
    # What the killed controller had not written yet is missing, and nothing else is.
    assert {*range(1, STEPS + 1)} - {*steps} <= {*range(1, killed[0] + 6)}
    assert steps[-1] == STEPS
    assert len(list((tmp_path / "counted" / "tensorboard").iterdir())) == 2, "a file of each controller"
    assert not [event.text for event in log.of(events.Warned) if "no more" in event.text]
