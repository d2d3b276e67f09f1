"""What a spec from a client may hold."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from serving import settings_in, token

from dashboard.app import create_app
from dashboard.jobs.submitted_spec import (
    CODE,
    DESTINATIONS,
    FILES,
    check_secrets,
    check_trust,
    spec_of,
    tables_of,
)
from orchestrator.client.errors import JobError
from orchestrator.spec.errors import subsections
from orchestrator.spec.job_spec import Spec

HARMLESS = {
    "model.fixed",
    "model.lora.targets",
    "model.lora.train",
    "job.stop_at",
    "checkpoint.keep_best",
    "data.columns",
    "data.labels",
    "optimizer.groups.match",
    "job.name",
    "model.weights_sha256",
    "data.sha256",
    "data.field",
    "optimizer.no_decay",
    "cluster.address",  # always replaced by the service's own
    "cluster.resources_per_rank",
    "logging.project",
    "logging.run",
    "model.arguments",  # of a factory, which is code
    "model.architecture",  # a name in a table
    "model.config",  # numbers and names of a model that transformers defines; code of its own is refused
    "model.processor",  # likewise
    "data.arguments",
}
"""Keys that take any text, and neither import, nor open, nor send anything."""


def holds_text(annotation: Any) -> bool:
    """Whether a value of this type may be, or hold, a text of the sender's choice."""
    if annotation is str:
        return True
    if get_origin(annotation) is types.UnionType or get_origin(annotation) is not None:
        return any(holds_text(part) for part in get_args(annotation) if not isinstance(part, str))
    return False


def text_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = subsections(section, name)
        for each in inner.values():
            yield from text_keys(each, f"{prefix}{name}.")
        if not inner and holds_text(field.annotation):
            yield f"{prefix}{name}"


def test_every_key_that_takes_text_is_harmless_or_checked() -> None:
    keys = set(text_keys(Spec))
    assert len(keys) > 12
    assert keys <= HARMLESS | {*CODE, *FILES, *DESTINATIONS}
    assert {*CODE, *FILES} | {*DESTINATIONS} - {"logging.wandb"} <= keys | {"logging.wandb"}


def spec(**sections: dict[str, Any]) -> Spec:
    return spec_of({"job": {"name": "sent"}, **sections})


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"factory": "os:system"}}, "model.factory = 'os:system' names Python code"),
        ({"data": {"source": "evil.module:open"}}, "data.source = .* names Python code"),
        ({"data": {"source": "text", "path": "/etc/passwd"}}, "data.path = '/etc/passwd' lies outside"),
        ({"data": {"source": "text", "path": ["ok.txt", "../x"]}}, r"data.path = '../x' lies outside"),
        ({"data": {"tokenizer": "/root/t.json"}}, "data.tokenizer"),
        ({"data": {"validation_path": "/etc/passwd"}}, "data.validation_path = '/etc/passwd' lies outside"),
        ({"job": {"name": "a", "output": "s3://bucket/run"}}, "job.output"),
        ({"job": {"name": "a", "output": "runs/../../out"}}, "job.output"),
        ({"pipeline": {"schedule": "csv:/etc/shadow"}}, "pipeline.schedule"),
        ({"logging": {"mlflow": "http://evil.example"}}, "logging.mlflow .* says where to send data"),
        ({"logging": {"wandb": "online"}}, "logging.wandb"),
    ],
)
def test_what_is_not_trusted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=problem):
        check_trust(spec(**sections), (tmp_path,))


def test_the_services_own_files_are_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokens = tmp_path / "home" / "tokens.json"
    for path in ("home/tokens.json", "home", "."):
        with pytest.raises(JobError, match="holds the service's own tokens"):
            check_secrets(spec(data={"source": "text", "path": path}), (tokens,))
    for path in ("a\0b", "~nobody-has-this-name/x"):
        with pytest.raises(JobError, match="is no path"):
            check_trust(spec(data={"source": "text", "path": path}), (tmp_path,))
    with pytest.raises(JobError, match="not TOML"):
        tables_of("a=" + "[" * 5000)


def test_the_folder_of_a_spec_that_names_none_is_below_the_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `runs/NAME`, where the service was started."""
    monkeypatch.chdir(tmp_path)
    check_trust(spec(), (tmp_path,))
    with pytest.raises(JobError, match=r"'runs/sent' lies outside .*: set job.output below --root$"):
        check_trust(spec(), (tmp_path / "jobs",))
    check_trust(spec(job={"name": "sent", "output": "jobs/sent"}), (tmp_path / "jobs",))


@pytest.mark.parametrize("trust_specs", [True, False])
@pytest.mark.parametrize("name", ["tokens.json", "audit.jsonl", "audit.jsonl.1", "key.pem", "."])
def test_no_trust_puts_the_services_own_files_within_reach(
    tmp_path: Path, trust_specs: bool, name: str
) -> None:
    settings = replace(settings_in(tmp_path), trust_specs=trust_specs, tls_key=tmp_path / "key.pem")
    app = create_app(settings)
    headers = {"Authorization": f"Bearer {token(settings)}"}
    tables = {"job": {"name": "sent", "output": str(tmp_path / "sent")}}
    tables["data"] = {"source": "text", "path": str(tmp_path / name)}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        refused = client.post("/api/v1/jobs", json={"spec": tables})
    assert refused.status_code == 422
    assert "holds the service's own tokens, audit log or TLS key" in refused.json()["detail"]


def test_an_ordinary_spec_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {
        "data": {"source": "text", "path": "corpus.txt"},
        "pipeline": {"schedule": "zbv"},
        "logging": {"wandb": "offline", "tensorboard": True},
    }
    check_trust(spec(**sections), (tmp_path,))


def test_a_wrong_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(JobError, match="did you mean 'steps'"):
        spec_of({"job": {"name": "a", "stepz": 3}})
    with pytest.raises(JobError, match="the spec is not TOML"):
        tables_of("[job")
