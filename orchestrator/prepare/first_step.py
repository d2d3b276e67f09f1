"""Tries a user's own code before anything starts: the first step's samples, and a small model's layers on them.

What is found here costs seconds of one process; on the ranks it would cost a cluster's start. Measures nothing, and
keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.spec.job_spec import Spec
from planner.course import Course
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from workers.data.dataset import Batch, Dataset
    from workers.models.definition import ModelDefinition

READ_S = 1.0
"""Time limit for reading; the first microbatch is read in any case."""
COMPUTE_S = 1.0
"""Time limit for computing; a layer that has begun ends."""
MOST_PARAMETERS = 20_000_000
MOST_INPUT_BYTES = 2**24
"""Most input bytes of a microbatch. A larger one, or a larger model, is left to the ranks."""


def own_code(spec: Spec) -> bool:
    """Whether the job runs code of the user's own."""
    return spec.model.user_code is not None or _own_source(spec)


def try_first_step(
    spec: Spec, definition: ModelDefinition, parameters: Sequence[int], dataset: Dataset
) -> None:
    """Read the first step's microbatches and the first of the validation, and compute with the first one.

    Args:
        parameters: of each layer.

    Raises:
        JobError: a sample cannot be read, or a layer or the loss does not work.
    """
    if not own_code(spec):
        return
    batch = _read(spec, dataset)
    if (
        spec.model.user_code is not None
        and _on_this_cpu(spec)
        and sum(parameters) <= MOST_PARAMETERS
        and sum(tensor.nbytes for tensor in batch.inputs) <= MOST_INPUT_BYTES
    ):
        _compute(spec, definition, batch)


def _own_source(spec: Spec) -> bool:
    return ":" in spec.data.source


def _read(spec: Spec, dataset: Dataset) -> Batch:
    """The first microbatch."""
    from workers.data.dataset import stream_of
    from workers.data.sampling import samples_at, validation_indices

    pipeline, size = spec.pipeline, spec.pipeline.microbatch_size
    count = pipeline.microbatches if isinstance(pipeline.microbatches, int) else 1
    course = Course.of(pipeline.replicas, count, size)
    stream = stream_of(dataset, spec.data.buckets, course)
    until_s = time.monotonic() + READ_S
    first, *others = (
        samples_at(spec.job.seed, course.positions(1, microbatch), stream, spec.data.shuffle)
        for microbatch in range(pipeline.replicas * count)
    )
    batch = _read_one(spec, dataset.train, first)
    if not _own_source(spec):
        return batch
    if spec.job.validate_every and (held_out := dataset.validation_samples):
        _read_one(spec, dataset.validation, validation_indices(0, size, held_out), "validation ")
    for indices in others:
        if time.monotonic() > until_s:
            break
        _read_one(spec, dataset.train, indices)
    return batch


def _read_one(spec: Spec, read: Callable[[list[int]], Batch], indices: list[int], kind: str = "") -> Batch:
    from workers.process.user_code import what_it_did, where

    try:
        return read(indices)
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"data.source = {spec.data.source!r}: reading {kind}samples {', '.join(map(str, indices))} for the first"
            f" step {what_it_did(error)}{where(error)}"
        ) from error


def _on_this_cpu(spec: Spec) -> bool:
    """Whether the ranks compute on CPUs, as this process can."""
    import torch

    cluster = spec.cluster
    return cluster.device == "cpu" or (
        cluster.device == "auto" and cluster.address == "local" and not torch.cuda.is_available()
    )


def _compute(spec: Spec, definition: ModelDefinition, batch: Batch) -> None:
    """The forward passes of the layers and the loss, as the ranks make them; one layer in memory at a time."""
    import torch

    from workers.build import build_layers
    from workers.layers.loss import Loss
    from workers.reproducibility import rng
    from workers.state.optim import make_optimizer

    seed, precision, device = spec.job.seed, spec.job.precision, torch.device("cpu")
    optimizer = make_optimizer(spec.optimizer, spec.job.steps)
    until_s = time.monotonic() + COMPUTE_S
    tensors, layer = batch.inputs, None
    try:
        for index, name in enumerate(definition.names):
            if time.monotonic() > until_s:
                return
            built = build_layers(
                definition, [index], seed=seed, precision=precision, device=device, optimizer=optimizer
            )
            layer, _ = built[index]
            # With gradients, which a layer may take as it goes.
            tensors, _ = layer.forward(tensors, rng.key(seed, "forward", 0, 0, name), keep=True)
        assert layer is not None  # a model has layers
        loss = Loss(layer, definition.loss, precision=precision, device=device)
        loss.forward(tensors, batch.targets, rng.key(seed, "loss", 0, 0), keep=True)
        if spec.job.validate_every:
            loss.evaluate(tensors, batch.targets)
    except JobError:
        raise
    except Exception:
        # Memory, or what only a rank has: the ranks will tell.
        return
