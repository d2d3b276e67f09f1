"""`PipelineTrainer` with a model and data given as functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import tiny

from orchestrator import trainer
from orchestrator.spec.job_spec import Spec
from orchestrator.trainer import PipelineTrainer
from workers.models.registry import build_definition
from workers.protocol.errors import JobError


def test_functions_are_submitted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Spec] = []

    def run(spec: Spec, **_: Any) -> None:
        submitted.append(spec)
        raise JobError("enough")

    monkeypatch.setattr(trainer, "run", run)
    given = tiny(tmp_path, "a")
    for own in ({}, {"model": build_definition, "data": JobError}):
        with pytest.raises(JobError, match="enough"):
            PipelineTrainer(given, progress=False, **own).fit()
    plain, named = submitted
    assert plain == given
    assert (named.model.factory, named.model.family) == ("workers.models.registry:build_definition", None)
    assert named.data.source == "workers.protocol.errors:JobError"
    assert named.job == given.job


def test_a_lambda_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"model = .*<lambda> of .* write it with def"):
        PipelineTrainer(tiny(tmp_path, "a"), model=lambda: None)
