"""Sinks that a job's `[logging]` section wants: the check for their packages, and the opening of each.

Imports no logger's library before the sink opens, which happens in the sink's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.spec.job_spec import LoggingConfig
from orchestrator.telemetry.loggers import LoggerSink
from orchestrator.telemetry.sinks import Sink
from workers.protocol.errors import JobError

MODULES = {
    "tensorboard": ("tensorboardX",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Key of `[logging]`, which is also the name of the extra -> modules that it needs."""
PROJECT = "freshet"
"""Project at loggers, if the spec names none."""
NAMES = {
    "tensorboard": "TensorBoard",
    "mlflow": "MLflow",
    "wandb": "Weights & Biases",
    "otel": "OpenTelemetry",
}


def wanted(logging: LoggingConfig) -> tuple[str, ...]:
    """The keys of `logging` that are on."""
    return tuple(key for key in MODULES if getattr(logging, key))


def check_packages(logging: LoggingConfig) -> None:
    """Check that the packages of all loggers are installed.

    Raises:
        JobError: one is missing; names the extra that has it.
    """
    for key in wanted(logging):
        modules = [module for module in MODULES[key] if not (key == "otel" and _on_console(logging, module))]
        if (missing := next((module for module in modules if not _installed(module)), None)) is not None:
            raise JobError(
                f"logging.{key} needs the Python module {missing!r}, which is not installed: pip install"
                f" 'freshet[{key}]' on every node, or leave logging.{key} out"
            )


def openers(
    logging: LoggingConfig,
    *,
    job: str,
    folder: Path,
    spec: Mapping[str, Any],
    step: int,
    warn: Callable[[str], None],
) -> dict[str, Callable[[], Sink]]:
    """Name for people -> what opens the sink, for each that `logging` wants.

    Args:
        folder: the local folder of the event log.
        spec: the resolved spec.
        step: steps up to this one were written by earlier controllers of the job.
        warn: takes a sink's warnings.
    """
    run, project = logging.run or job, logging.project or PROJECT
    opening: dict[str, Callable[[], Sink]] = {
        "tensorboard": partial(_tensorboard, folder / "tensorboard", step),
        "mlflow": partial(_mlflow, logging.mlflow or "", project, job, run, spec, step),
        "wandb": partial(_wandb, logging.wandb or "offline", folder, project, job, run, spec, step),
        "otel": partial(_otel, logging.otel or "console", job, warn),
    }
    return {NAMES[key]: opening[key] for key in wanted(logging)}


def _tensorboard(folder: Path, step: int) -> Sink:
    from orchestrator.telemetry.tensorboard_logger import TensorBoardLogger

    return LoggerSink(TensorBoardLogger(folder), step)


def _mlflow(location: str, project: str, job: str, run: str, spec: Mapping[str, Any], step: int) -> Sink:
    from orchestrator.telemetry.mlflow_logger import MlflowLogger

    return LoggerSink(MlflowLogger(location, experiment=project, name=job, run=run, spec=spec), step)


def _wandb(
    mode: Any, folder: Path, project: str, job: str, run: str, spec: Mapping[str, Any], step: int
) -> Sink:
    from orchestrator.telemetry.wandb_logger import WandbLogger

    return LoggerSink(WandbLogger(mode, folder=folder, project=project, name=job, run=run, spec=spec), step)


def _otel(target: str, job: str, warn: Callable[[str], None]) -> Sink:
    from orchestrator.telemetry.otel import SpanSink, make_exporter

    return SpanSink(make_exporter(target), job=job, warn=warn)


def _on_console(logging: LoggingConfig, module: str) -> bool:
    return logging.otel == "console" and "exporter" in module


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
