"""One run at an MLflow server, or in a folder of MLflow's files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from orchestrator.telemetry.loggers import StepValues

RUN_TAG = "freshet.run"
"""Tag by which a resumed job finds its run."""
BATCH = 1_000
"""Most values that MLflow takes in one call."""
PARAMETERS = 100
"""Most parameters that MLflow takes in one call."""
VALUE_CHARACTERS = 500
"""Longest value of a parameter that all of MLflow's stores take."""


class MlflowLogger:
    """The run with identity `run` of an experiment; made if there is none.

    Args:
        location: `http://` or `https://` of a server, or the path of a folder.
        spec: shown as the parameters of a new run.
    """

    def __init__(
        self, location: str, *, experiment: str, name: str, run: str, spec: Mapping[str, Any]
    ) -> None:
        if "://" not in location:
            # MLflow asks whoever uses its files to consent: they get no new features.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            location = Path(location).as_uri()
        self._client = MlflowClient(tracking_uri=location)
        found = self._client.get_experiment_by_name(experiment)
        where = found.experiment_id if found is not None else self._create(experiment)
        runs = self._client.search_runs([where], f"tags.`{RUN_TAG}` = '{run}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(where, run_name=name, tags={RUN_TAG: run}).info.run_id
        parameters = [Param(key, value[:VALUE_CHARACTERS]) for key, value in flattened(spec)]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS])

    def _create(self, experiment: str) -> str:
        try:
            return self._client.create_experiment(experiment)
        except MlflowException:  # another job was faster
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                raise
            return found.experiment_id

    def log(self, entries: Sequence[StepValues]) -> None:
        """Send `entries`."""
        metrics = [
            Metric(name, value, round(entry.time_s * 1e3), entry.step)
            for entry in entries
            for name, value in entry.values.items()
        ]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + BATCH])

    def close(self) -> None:
        """End the run; a resumed job opens it again."""
        self._client.set_terminated(self._id)


def flattened(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a spec as `section.key` and text, without those that are unset."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", str(value)
