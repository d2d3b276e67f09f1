"""The job spec: eleven sections, read from TOML or built in Python, the same object either way.

Sections that ranks use live in `workers/config.py`. What depends on the model, the data, the cluster or the plan is
settled in `orchestrator/prepare/settling.py`; what can be told from the spec alone is checked in `rules.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from orchestrator.spec.errors import explain
from planner.ir import Schedule
from workers.config import (
    AdaptConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ElasticConfig,
    EmulatedConfig,
    FreezeConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    WorkerConfig,
)
from workers.protocol.errors import JobError
from workers.protocol.section import Section

__all__ = [
    "AdaptConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "ElasticConfig",
    "EmulatedConfig",
    "FreezeConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "Spec",
    "load",
    "parse_override",
]


class LoggingConfig(Section):
    """`[logging]`: where the job's numbers go besides its event log. A logger that fails costs one warning."""

    tensorboard: bool = False
    """Whether to write TensorBoard's event files to `tensorboard/` in the job's folder (extra `tensorboard`)."""
    mlflow: str | None = None
    """MLflow tracking server, `http://` or `https://`, or a folder of MLflow's files (extra `mlflow`)."""
    wandb: Literal["online", "offline"] | None = None
    """Weights & Biases (extra `wandb`). `offline` writes to `wandb/` in the job's folder, for `wandb sync`."""
    project: str | None = None
    """Experiment at MLflow and project at Weights & Biases; unset: `freshet`."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    """Identity of the run at MLflow and Weights & Biases; unset: a random one. A resumed job keeps it."""
    otel: str | None = None
    """OpenTelemetry spans of recoveries and moves (extra `otel`). An OTLP endpoint, `http://` or `https://`; `env`:
    what the OTEL_ variables of the controller's process say; `console`: the controller's output."""

    @property
    def recorded(self) -> bool:
        """Whether a logger keeps runs under an identity."""
        return self.mlflow is not None or self.wandb is not None


class Spec(WorkerConfig):
    """A whole job."""

    logging: LoggingConfig = LoggingConfig()
    """Where its numbers go."""
    _table: Schedule | None = PrivateAttr(default=None)

    @property
    def table(self) -> Schedule | None:
        """The user's own schedule, as it was read when the spec was checked."""
        return self._table

    def with_table(self, table: Schedule) -> Spec:
        """This spec with the user's own schedule."""
        spec = self.model_copy()
        spec._table = table
        return spec

    @property
    def for_ranks(self) -> WorkerConfig:
        """The sections that ranks use."""
        return WorkerConfig(**{name: getattr(self, name) for name in WorkerConfig.model_fields})


def load(path: Path, overrides: Iterable[str] = ()) -> Spec:
    """The spec in the TOML file `path`, with `overrides` such as `model.width=256` applied in order.

    Raises:
        JobError: the file is missing or no TOML, an override is malformed, a key unknown or a value wrong.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read the spec {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    overridden = set()
    for override in overrides:
        key, value = parse_override(override)
        _put(tables, key, value)
        overridden.add(".".join(key))
    try:
        return Spec.model_validate(_nulls(tables))
    except ValidationError as error:
        raise JobError(explain(error, Spec, source=str(path), overridden=overridden)) from error


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Key path and value of `a.b=c`: the value is read as TOML, a bare word as a string.

    Raises:
        JobError: there is no `=`, or the key has no section.
    """
    name, equals, value = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or len(key) < 2 or not all(key):
        raise JobError(f"--set {text}: expected section.key=value, such as model.width=256")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key, value.strip()


def _put(tables: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    """Set `tables[key[0]][key[1]]...`, making tables on the way."""
    table = tables
    for depth, part in enumerate(key[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise JobError(f"--set {'.'.join(key)}: {'.'.join(key[:depth])} is a value, not a section")
    table[key[-1]] = value


def _nulls(value: Any) -> Any:
    """`value` with each string `null` as None: TOML has no null, and some settings are turned off by it."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    return None if value == "null" else value
