"""Opens what a spec names: its paths, and the outline of its model and data, whose first step it tries.

`outline_model` imports torch, so that a user's mistakes show before any actor starts. Decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.events.types import WeightsUnmatched
from orchestrator.prepare.first_step import try_first_step
from orchestrator.prepare.profile_cache import cache_folder
from orchestrator.spec.job_spec import Spec
from planner.wording import counted
from workers.config import EmulatedConfig
from workers.models.families.family import ModelFamily
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from workers.metrics.measure import Measure
    from workers.models.definition import ModelDefinition, ParameterRef
    from workers.models.outline import LayerOutline


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Facts about the model and the data that the spec does not state."""

    layers: tuple[str, ...]
    """Names of the layers, in order."""
    parameters: tuple[int, ...]
    """Per layer, its number of parameters."""
    vocabulary: int | None
    """Number of tokens that the data's tokenizer knows."""
    language: bool
    """Whether text can be sampled from the model."""
    emulated: EmulatedConfig
    """The modelled times, per layer if the device is emulated."""
    buffers: bool = False
    """Whether some layer has persistent buffers: then no replica can be divided among pipelines."""
    weights: str | None = None
    """See `pinned`."""
    weights_sha256: str | None = None
    """Hash of the file with the initial weights."""
    unmatched: WeightsUnmatched | None = None
    """Differences between the model and the files of weights that its family reads."""
    data_sha256: str | None = None
    """Hash of the text's tokens; None if the samples are not text of a built-in source."""
    train_samples: int = 1
    """Training samples."""


def _all_absolute(path: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    paths = (path,) if isinstance(path, str) else path or ()
    return tuple(map(_absolute, paths)) or None


def absolute(spec: Spec) -> Spec:
    """`spec` with every path absolute: ranks run in another folder than the user."""
    data, freeze, cluster, notice_file = spec.data, spec.freeze, spec.cluster, spec.elastic.notice_file
    model = spec.model.located(_absolute)
    tokenizer = data.tokenizer or model.own_tokenizer or "bytes"
    changes = {
        "model": model,
        "job": spec.job.model_copy(update={"output": _absolute(spec.job.folder)}),
        "data": data.model_copy(
            update={
                "path": _all_absolute(data.path),
                "validation_path": _all_absolute(data.validation_path),
                "tokenizer": tokenizer if tokenizer == "bytes" else _absolute(tokenizer),
                "cache": _absolute(data.cache) if data.cache is not None else None,
            }
        ),
        "logging": spec.logging.model_copy(
            update={"mlflow": _absolute(spec.logging.mlflow) if spec.logging.mlflow is not None else None}
        ),
        "freeze": freeze
        if freeze.cache in ("auto", "off")
        else freeze.model_copy(update={"cache": _absolute(freeze.cache)}),
        "elastic": spec.elastic.model_copy(
            update={"notice_file": _absolute(notice_file) if notice_file is not None else None}
        ),
        "cluster": cluster.model_copy(
            update={
                "emulated": cluster.emulated.model_copy(
                    update={
                        "profile": _absolute(cluster.emulated.profile) if cluster.emulated.profile else None
                    }
                )
            }
        ),
    }
    return spec.model_copy(update=changes)


def outline_model(spec: Spec) -> ModelOutline:
    """Open the model's outline and the data of an `absolute` spec. Imports torch.

    Raises:
        JobError: a factory, a source, a layer, a size or a file of weights does not work.
    """
    from workers.data.registry import open_dataset
    from workers.devices.emulated import layer_times
    from workers.models.outline import outline
    from workers.models.registry import build_definition

    data = open_dataset(spec.data, spec.model, spec.job.folder)
    _check_microbatch(spec, data.dataset.train_samples)
    definition = build_definition(spec.model, data.vocabulary)
    _check_metric(spec, data.measure or definition.measure)
    outlines = outline(definition)
    spec.model.check_layers()
    try_first_step(spec, definition, [layer.parameters for layer in outlines], data.dataset)
    emulated = spec.cluster.emulated
    if spec.cluster.device == "emulated":
        emulated = EmulatedConfig.model_validate(layer_times(emulated, len(outlines)))
    weights, weights_sha256 = _check_weights(spec.model, outlines, definition.ties)
    return ModelOutline(
        layers=tuple(layer.name for layer in outlines),
        parameters=tuple(layer.parameters for layer in outlines),
        vocabulary=data.vocabulary,
        language=definition.language and data.tokenizer is not None,
        emulated=emulated,
        buffers=any(layer.buffers for layer in outlines),
        weights=weights,
        weights_sha256=weights_sha256,
        unmatched=_unmatched(definition),
        data_sha256=data.sha256,
        train_samples=data.dataset.train_samples,
    )


def _unmatched(definition: ModelDefinition) -> WeightsUnmatched | None:
    drawn, left_over = definition.unmatched() if definition.unmatched is not None else ((), ())
    return WeightsUnmatched(drawn=drawn, left_over=left_over) if drawn or left_over else None


def import_compiler() -> None:
    """Import what `count_flops` imports of PyTorch, which takes a second or two."""
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def count_flops(spec: Spec) -> float | None:
    """Floating-point operations of a sample's forward and backward passes through the model of a spec that was opened;
    None where they cannot be told. Imports PyTorch's compiler."""
    from workers.data.registry import open_dataset
    from workers.models.registry import build_definition
    from workers.profiling.flops import flops_per_sample

    try:
        data = open_dataset(spec.data, spec.model, spec.job.folder)
        return flops_per_sample(build_definition(spec.model, data.vocabulary), data.dataset)
    except (Exception, SystemExit):  # it was opened before: the ranks will tell
        return None


def _check_microbatch(spec: Spec, train_samples: int) -> None:
    """Raises:
    JobError: a microbatch would hold samples twice.
    """
    size = spec.pipeline.microbatch_size
    if size > train_samples:
        raise JobError(
            f"pipeline.microbatch_size = {size:,} is more than the {counted(train_samples, 'training sample')} of"
            f" data.source = {spec.data.source!r}: use {train_samples:,} at most, or more data"
        )


def _check_weights(
    model: ModelFamily, outlines: Sequence[LayerOutline], ties: Sequence[Sequence[ParameterRef]]
) -> tuple[str | None, str | None]:
    """Path and sha256 of the file, or the checkpoint, with the initial weights; None without one.

    Raises:
        JobError: the file cannot be read, holds another model, or is not the one that `model` asks for.
    """
    from workers.checkpoint.initial_weights import check_weights, pinned

    if model.weights is None:
        if model.weights_sha256 is not None:
            raise JobError("model.weights_sha256 is set and model.weights is not: name the file too")
        return None, None
    shapes = {f"{layer.name}.{name}": shape for layer in outlines for name, shape in layer.shapes.items()}
    path, of_checkpoint = pinned(model.weights)
    check_weights(path, shapes, ties)
    sha256 = of_checkpoint or sha256_of(path, cache_folder(os.environ).parent / "sha256")
    if model.weights_sha256 not in (None, sha256):
        raise JobError(
            f"model.weights = {model.weights!r} has the sha256 {sha256}, not model.weights_sha256 ="
            f" {model.weights_sha256!r}: the file has changed, or it is another one"
        )
    return path, sha256


def _absolute(path: str) -> str:
    """`path` relative to the driver's folder, made absolute; a URI stays, unless it is a local file's."""
    path = path.removeprefix("file://")
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _check_metric(spec: Spec, measure: Measure | None) -> None:
    """Raises:
    JobError: the model's task has no such metric.
    """
    names = ("loss", *(() if measure is None else measure.names))
    target = spec.job.target
    asked = {
        f'job.stop_at = "{spec.job.stop_at}"': None if target is None else target.metric,
        f'checkpoint.keep_best = "{spec.checkpoint.keep_best}"': spec.checkpoint.keep_best,
    }
    for key, metric in asked.items():
        if metric is not None and metric not in names:
            raise JobError(f"{key}: the metrics of this model are {', '.join(names)}; name one of them")


def sha256_of(path: str, cache: Path) -> str:
    """The sha256 (hex) of the file at `path`, kept by size and time: weights take a second per gigabyte to read.

    Args:
        cache: folder of what is known; a file in it that cannot be read or written costs time alone.

    Raises:
        OSError: the file cannot be read.
    """
    stat = os.stat(path)
    state = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    entry = cache / f"{hashlib.sha256(json.dumps(state[:1]).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(entry.read_bytes())
        if known["file"] == state and isinstance(known["sha256"], str):
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _keep_digest(entry, json.dumps({"file": state, "sha256": found}))
    return found


def _keep_digest(entry: Path, text: str) -> None:
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(part, entry)
