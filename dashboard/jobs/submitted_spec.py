"""Checks of a spec that a client sends: valid keys, no Python code of its choice, no files outside allowed folders.

Pure except for resolving paths.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.client.errors import JobError
from orchestrator.spec.errors import explain
from orchestrator.spec.job_spec import Spec

CODE = ("model.factory", "data.source")
"""Keys that may name Python code to import, as `package.module:function`."""
FILES = (
    "job.output",
    "model.weights",
    "model.path",
    "data.path",
    "data.validation_path",
    "data.tokenizer",
    "data.cache",
    "pipeline.schedule",
    "elastic.notice_file",
    "freeze.cache",
    "cluster.emulated.profile",
)
"""Keys that may name a file or a folder."""
NO_FILES = {"data.tokenizer": ("bytes",), "freeze.cache": ("auto", "off")}
"""Values of these keys that name none."""
DESTINATIONS = {"logging.mlflow": (), "logging.otel": ("console",), "logging.wandb": ("offline",)}
"""Keys that may say where data is sent, and values of theirs that send none."""


def tables_of(toml: str) -> dict[str, Any]:
    """The tables of a spec's text.

    Raises:
        JobError: it is not TOML.
    """
    try:
        return tomllib.loads(toml)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise JobError(f"the spec is not TOML: {error}") from error


def spec_of(tables: Mapping[str, Any]) -> Spec:
    """The spec in `tables`.

    Raises:
        JobError: a key is unknown (names the nearest right one) or a value wrong.
    """
    try:
        return Spec.model_validate(tables)
    except ValidationError as error:
        raise JobError(explain(error, Spec, source="the spec")) from error


def check_trust(spec: Spec, roots: Sequence[Path]) -> None:
    """Check that `spec` imports no code of its sender's choice, sends no data anywhere, and names no files outside
    `roots`; the job's folder is below them even if the spec names none.

    Raises:
        JobError: it does.
    """
    for key, text in _texts(spec.model_dump(mode="json")):
        if key in CODE and ":" in text:
            raise JobError(
                f"{key} = {text!r} names Python code to import, which this service takes from no client: start it"
                " with --trust-specs, or submit the job with `ray job submit`"
            )
        if key in DESTINATIONS and text not in DESTINATIONS[key]:
            raise JobError(
                f"{key} = {text!r} says where to send data, which this service takes from no client: start it with"
                " --trust-specs, or submit the job with `ray job submit`"
            )
    for key, text, path in _files(spec):
        if "://" in text or not any(path.is_relative_to(root.resolve()) for root in roots):
            allowed = ", ".join(map(str, roots)) or "no folder"
            outside = f"lies outside the folders that a submitted spec may name ({allowed})"
            if key == "job.output" and spec.job.output is None:
                raise JobError(
                    f"the spec names no job.output, and the job's folder {text!r} {outside}: set job.output below"
                    " --root"
                )
            raise JobError(
                f"{key} = {text!r} {outside}: start the service with --root FOLDER, or with --trust-specs"
            )


def check_secrets(spec: Spec, secrets: Sequence[Path]) -> None:
    """Check that `spec` names none of `secrets`, and no folder that holds one.

    Raises:
        JobError: it does.
    """
    for key, text, path in _files(spec):
        if any(each.resolve().is_relative_to(path) for each in secrets):
            raise JobError(
                f"{key} = {text!r} holds the service's own tokens, audit log or TLS key: name another file or folder"
            )


def _files(spec: Spec) -> Iterator[tuple[str, str, Path]]:
    """The files and folders that `spec` names, and the job's folder: (key, text, path).

    Raises:
        JobError: one is no path.
    """
    named = [*_texts(spec.model_dump(mode="json"))]
    if spec.job.output is None:
        named.append(("job.output", spec.job.folder))
    for key, text in named:
        if key not in FILES or text in NO_FILES.get(key, ()):
            continue
        if key == "pipeline.schedule":
            _, colon, text = text.partition(":")
            if not colon:
                continue
        try:
            yield key, text, Path(text).expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise JobError(f"{key} = {text!r} is no path: {error}") from error


def _texts(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _texts(value, f"{key}.")
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str):
                yield key, text
