"""Experiment loggers, read back from what they wrote: nothing is missing, nothing twice, and nothing fails the job."""

from __future__ import annotations

import json
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from eventful_run import CHECKPOINT, FLOPS_PER_SAMPLE, LAST, STEPS, TRAIN_SAMPLES, eventful
from mlflow.tracking import MlflowClient
from pace import patient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_jobs import tiny

from orchestrator.client.submit import Submission
from orchestrator.events.types import FlopsCounted, Record, Submitted
from orchestrator.history.totals import PARTS
from orchestrator.prepare.resumption import adopt
from orchestrator.spec.job_spec import LoggingConfig, Spec
from orchestrator.spec.rules import check
from orchestrator.telemetry import wanted
from orchestrator.telemetry.loggers import LoggerSink, StepValues
from orchestrator.telemetry.sinks import WAITING_RECORDS, SinkThread
from workers.protocol.errors import JobError
from workers.protocol.reports import StepReport

SPEC = {"job": {"name": "logged", "seed": 7, "output": None}}
HEAD = 40
"""The first start logs the steps up to here; the second one the rest."""
CLOSE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that logged everywhere, in two starts, to one run."""
    folder = tmp_path_factory.mktemp("logged")
    logging = LoggingConfig(tensorboard=True, mlflow=str(folder / "mlflow"), wandb="offline", run="r1")
    records = eventful().records
    cut = next(
        number
        for number, record in enumerate(records)
        if isinstance(record.event, StepReport) and record.event.step > HEAD
    )
    # The second start trains the last ten steps of the first one again.
    again = [
        record
        for record in records[:cut]
        if isinstance(record.event, StepReport) and record.event.step > HEAD - 10
    ]
    warnings: list[str] = []
    # W&B makes folders of its own where temporary files are, at its import, and a killed process leaves them.
    monkeypatch = pytest.MonkeyPatch()
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    for step, part in ((0, records[:cut]), (HEAD, [*again, *records[cut:]])):
        opening = wanted.openers(
            logging, job="logged", folder=folder, spec=SPEC, step=step, warn=warnings.append
        )
        sinks = [SinkThread(name, open, warnings.append) for name, open in opening.items()]
        for sink in sinks:
            for record in part:
                sink.accept(record)
        for sink in sinks:
            sink.close(patient(CLOSE_S))
    monkeypatch.undo()
    assert warnings == []
    return folder


@pytest.fixture(scope="module")
def losses() -> dict[int, float]:
    """Step -> loss when it was first committed."""
    found: dict[int, float] = {}
    for record in eventful().records:
        if isinstance(record.event, StepReport):
            found.setdefault(record.event.step, record.event.loss)
    return found


def test_tensorboard_shows_each_step_once_over_two_starts(folder: Path, losses: dict[int, float]) -> None:
    seen = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    points = seen.Scalars("loss")
    assert [point.step for point in points] == list(range(1, LAST + 1))
    assert [point.value for point in points] == pytest.approx([losses[n] for n in range(1, LAST + 1)])
    assert [point.step for point in seen.Scalars("validation_loss")] == [25, 50, LAST]
    (move,) = seen.Scalars("recovery_seconds/move")
    assert (move.step, move.value) == (CHECKPOINT, 2.0)
    assert {f"recovery_seconds/{part}" for part in PARTS} <= set(seen.Tags()["scalars"])
    first = next(each for each in eventful().records if isinstance(each.event, StepReport))
    assert points[0].wall_time == pytest.approx(first.time_s, abs=1e-3), "when it was committed"


def test_mlflow_has_one_run_over_two_starts(
    folder: Path, losses: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("freshet")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("logged", "FINISHED")
    assert run.data.params == {"job.name": "logged", "job.seed": "7"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {each.step: each.value for each in history} == pytest.approx(losses)
    assert len(history) == LAST
    (rerun,) = client.get_metric_history(run.info.run_id, "steps_rerun")
    assert (rerun.step, rerun.value) == (CHECKPOINT, 1 + STEPS - CHECKPOINT)


def wandb_rows(folder: Path) -> list[dict[str, str]]:
    """What W&B's files have by now of the run's history."""
    from wandb.proto import wandb_internal_pb2  # after the fixture: see there

    files = sorted((folder / "wandb").glob("offline-run-*/run-r1.wandb"))
    assert len(files) == 2, "`wandb sync` joins them, as they have one id"
    rows = []
    for file in files:
        for raw in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(raw)
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
            elif record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.project, record.run.display_name) == (
                    "r1",
                    "freshet",
                    "logged",
                )
    return rows


def test_wandb_offline_has_one_run_over_two_starts(folder: Path, losses: dict[int, float]) -> None:
    deadline_s = time.monotonic() + patient(30)
    # A process of W&B writes the files, and may be behind.
    while True:
        rows = wandb_rows(folder)
        if sum("loss" in row for row in rows) >= LAST or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    logged = {int(row["step"]): json.loads(row["loss"]) for row in rows if "loss" in row}
    assert logged == pytest.approx(losses)
    assert len([row for row in rows if "loss" in row]) == LAST
    assert [int(row["step"]) for row in rows if "recovery_seconds/move" in row] == [CHECKPOINT]


def wandb_records(file: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log format, in blocks of 32 KiB, after a header of seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", file[at : at + 7])
        if at + 7 + length > len(file):  # it is being written
            return
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class Failing:
    """A sink that takes `good` batches and then fails."""

    def __init__(self, good: int) -> None:
        self.left = good

    def accept(self, records: Sequence[Record]) -> None:
        if not self.left:
            raise ConnectionError("no route to host\nand a long story")
        self.left -= 1

    def close(self) -> None: ...


class Stuck:
    """A sink that takes nothing until `go` is set."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go

    def accept(self, records: Sequence[Record]) -> None:
        self.go.wait()

    def close(self) -> None: ...


def records(count: int) -> list[Record]:
    return eventful().records[:1] * count


def wait_for(warnings: list[str]) -> None:
    deadline_s = time.monotonic() + patient(30)
    while not warnings:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("good", [0, 1])
def test_a_sink_that_fails_costs_one_warning(good: int) -> None:
    warnings: list[str] = []
    sink = SinkThread("MLflow", partial(Failing, good), warnings.append)
    for record in records(50):
        sink.accept(record)
        time.sleep(0.001)
    wait_for(warnings)
    for record in records(50):
        sink.accept(record)
    sink.close(patient(CLOSE_S))
    assert warnings == ["MLflow gets no more of this job's numbers: ConnectionError: no route to host"]


def test_a_sink_that_cannot_open_costs_one_warning() -> None:
    def open() -> Any:
        raise OSError("the folder is read only")

    warnings: list[str] = []
    sink = SinkThread("TensorBoard", open, warnings.append)
    wait_for(warnings)
    sink.close(patient(CLOSE_S))
    assert warnings == ["TensorBoard gets no more of this job's numbers: OSError: the folder is read only"]


def test_a_sink_that_hangs_blocks_nobody_and_keeps_a_bounded_backlog() -> None:
    warnings: list[str] = []
    go = threading.Event()
    sink = SinkThread("MLflow", partial(Stuck, go), warnings.append)
    (record,) = records(1)
    begun_s = time.monotonic()
    for _ in range(2 * WAITING_RECORDS + 2):
        sink.accept(record)
    sink.close(0.1)
    assert time.monotonic() - begun_s < patient(5)
    assert warnings == ["MLflow gets no more of this job's numbers: it is 10,000 events behind"]
    go.set()


def test_a_sink_that_does_not_end_is_left_behind() -> None:
    warnings: list[str] = []
    go = threading.Event()
    sink = SinkThread("MLflow", partial(Stuck, go), warnings.append)
    sink.accept(*records(1))
    sink.close(0.1)
    assert warnings == ["MLflow gets no more of this job's numbers: it has not ended within 0.1 s"]
    go.set()


@pytest.mark.parametrize(
    ("logging", "missing", "told"),
    [
        (
            {"tensorboard": True},
            "tensorboardX",
            r"logging.tensorboard needs .*'tensorboardX'.*freshet\[tensorboard\]",
        ),
        ({"mlflow": "/tmp/m"}, "mlflow", r"logging.mlflow needs .*'mlflow'.*freshet\[mlflow\]"),
        ({"wandb": "offline"}, "wandb", r"logging.wandb needs .*'wandb'.*freshet\[wandb\]"),
        ({"otel": "http://h:4318"}, "opentelemetry.exporter.otlp.proto.http", r"freshet\[otel\]"),
    ],
)
def test_a_missing_package_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, logging: dict[str, Any], missing: str, told: str
) -> None:
    wanted.check_packages(LoggingConfig.model_validate(logging))
    monkeypatch.setattr(wanted, "_installed", lambda module: module != missing)
    with pytest.raises(JobError, match=told):
        wanted.check_packages(LoggingConfig.model_validate(logging))
    wanted.check_packages(LoggingConfig(otel="console") if "otel" in logging else LoggingConfig())


def test_the_submission_says_what_is_missing_and_names_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tiny(tmp_path, "named", logging={"mlflow": str(tmp_path / "mlflow")})
    first, second = (Submission(given, resume=False, say=print).spec.logging.run for _ in range(2))
    assert first
    assert second
    assert first != second
    assert Submission(tiny(tmp_path, "quiet"), resume=False, say=print).spec.logging.run is None
    monkeypatch.setattr(wanted, "_installed", lambda module: False)
    with pytest.raises(JobError, match=r"pip install 'freshet\[mlflow\]'"):
        Submission(given, resume=False, say=print)


@pytest.mark.parametrize(
    ("logging", "output", "told"),
    [
        ({"mlflow": "https://me:secret@h"}, None, "logging.mlflow holds a user name or a password"),
        ({"otel": "http://token@h:4318"}, None, "logging.otel holds a user name or a password"),
        (
            {"mlflow": "sqlite:///runs.db"},
            None,
            "expected http://HOST:PORT, https://HOST or the path of a folder",
        ),
        ({"otel": "h:4318"}, None, "logging.otel = 'h:4318': expected http://HOST:PORT"),
        (
            {"tensorboard": True},
            "s3://bucket/run",
            "logging.tensorboard = true writes files beside the event log",
        ),
        ({"wandb": "offline"}, "s3://bucket/run", 'logging.wandb = "offline" writes files'),
    ],
)
def test_a_wrong_logger_is_an_error_in_words(logging: dict[str, Any], output: str | None, told: str) -> None:
    with pytest.raises(JobError, match=re.escape(told)) as error:
        check(Spec.model_validate({"job": {"name": "a", "output": output}, "logging": logging}))
    assert "secret" not in str(error.value)


def test_a_resumed_job_keeps_the_run_unless_it_names_another() -> None:
    def spec(**logging: str) -> Spec:
        return Spec.model_validate({"job": {"name": "a"}, "logging": {"wandb": "offline", **logging}})

    before = spec(run="first").model_dump(mode="json")
    assert adopt(spec(), before).logging.run == "first"
    assert adopt(spec(run="other"), before).logging.run == "other"
    assert adopt(spec(), {"job": {"name": "a"}}).logging.run is None, "an older log has no such section"


def test_installed_is_asked_of_python() -> None:
    assert wanted._installed("tensorboardX")
    assert not wanted._installed("opentelemetry.exporter.no_such_part.http")


def test_a_job_that_logs_nothing_opens_nothing() -> None:
    spec = Spec.model_validate({"job": {"name": "quiet"}})
    assert wanted.wanted(spec.logging) == ()
    texts = [value for value in spec.logging.model_dump().values() if isinstance(value, str)]
    assert texts == [], "a service takes no text of this section from a client that it does not trust"
    assert set(wanted.NAMES) == set(wanted.MODULES) <= set(LoggingConfig.model_fields)


def test_a_step_tells_its_share_of_the_data_and_the_use_of_devices() -> None:
    class Kept:
        def __init__(self) -> None:
            self.entries: list[StepValues] = []

        def log(self, entries: Sequence[StepValues]) -> None:
            self.entries += entries

        def close(self) -> None: ...

    def logged(records: list[Record]) -> dict[int, StepValues]:
        kept = Kept()
        LoggerSink(kept, 0).accept(records)
        return {each.step: each for each in kept.entries if "loss" in each.values}

    records = eventful().records
    values = logged(records)[LAST].values
    step = next(each.event for each in reversed(records) if isinstance(each.event, StepReport))
    assert values["epochs"] == LAST * step.samples / TRAIN_SAMPLES
    assert values["samples_per_hour"] == pytest.approx(3600 * step.samples / step.step_s)
    assert values["flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * step.samples / step.step_s)
    without = logged([each for each in records if not isinstance(each.event, Submitted | FlopsCounted)])[
        LAST
    ].values
    assert without.keys() == values.keys() - {"epochs", "flops_per_second"}
