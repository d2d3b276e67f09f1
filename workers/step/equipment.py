"""The equipment with which a rank trains in every generation, whatever its place; it is opened as the rank starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.features import FeatureSample
from planner.observed import StepTimes
from workers.activation_cache.cache import ActivationCache, CacheSubject
from workers.activation_cache.cache_folders import CacheFolders
from workers.activation_cache.code import code_of_source
from workers.config import WorkerConfig
from workers.control.activity import Activity
from workers.control.mailbox import Mailbox
from workers.control.rescues import Rescues
from workers.data.dataset import OpenData, draws_anew
from workers.data.read_ahead import ReadAhead
from workers.data.registry import open_dataset
from workers.devices.device import Device
from workers.devices.machine import arithmetic
from workers.devices.registry import make_device
from workers.fault_injection.points import FaultPoints
from workers.layer_check.check import LayerCheck
from workers.layers.compiler import Compiler
from workers.layers.layer import Tensors
from workers.metrics.measure import Measure
from workers.models.definition import ModelDefinition
from workers.models.registry import build_definition
from workers.protocol.errors import JobError
from workers.protocol.reports import Report, WarningReport
from workers.sampling.sampler import sampler_of
from workers.state.optim import Optimizer, make_optimizer
from workers.state_stream.following import Followers


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """Things with which a rank trains in every generation, whatever its place."""

    config: WorkerConfig
    rank: int
    """Its number."""
    host: str
    """Address at which it serves layers."""
    definition: ModelDefinition
    data: OpenData
    reading: ReadAhead
    """Reads its microbatches."""
    optimizer: Optimizer
    device: Device
    mailbox: Mailbox
    followers: Followers
    """Peers outside the group that follow layers of this rank."""
    faults: FaultPoints
    activity: Activity
    kept: ActivationCache
    """Activations after the frozen layers that it begins with."""
    check: LayerCheck
    """Compares its layers with plain autograd."""
    compiler: Compiler | None = None
    """Compiles its layers, if the job wants that."""
    rescues: Rescues
    """When the ranks write a checkpoint because the cluster's head is lost."""
    report: Callable[[Report], None]
    log_sha256: Callable[[], str | None] = lambda: None
    """Returns the hash of a line of the job's event log, if one is known."""
    observe: Callable[[StepTimes], None] | None = None
    """Takes the times of each step, before all have passed its commit. None: nobody wants them."""
    surroundings: Callable[[], FeatureSample | None] = lambda: None
    """Returns the newest sample of its device and host."""

    @property
    def measure(self) -> Measure | None:
        """Metrics of a validation beside the loss: the data's own, else the model's."""
        return self.data.measure or self.definition.measure


def equip(
    config: WorkerConfig,
    rank: int,
    host: str,
    *,
    secret: bytes,
    mailbox: Mailbox,
    activity: Activity,
    faults: FaultPoints,
    rescues: Rescues,
    report: Callable[[Report], None],
    log_sha256: Callable[[], str | None],
    observe: Callable[[StepTimes], None] | None,
    closing: ExitStack,
) -> Equipment:
    """Open the data, the model definition and the device; `closing` closes them.

    Args:
        secret: the job's; empty: ranks ask each other for nothing.

    Raises:
        JobError: one of them is not usable, or the job's settings do not go with the model.
    """
    data = open_dataset(config.data, config.model, config.job.folder)
    definition = build_definition(config.model, data.vocabulary)
    device = make_device(config, len(definition.layers))
    sampler = None if observe is None else sampler_of(device.torch_device)
    if sampler is not None:
        closing.callback(sampler.close)
    optimizer = make_optimizer(config.optimizer, config.job.steps, len(definition.layers))
    optimizer.check_ties(definition.ties)
    if definition.ties and config.elastic.salvage != "none":
        raise JobError(
            f'elastic.salvage = "{config.elastic.salvage}" gives layers other moments than those that they share'
            " parameters with, and shared parameters would drift apart: leave salvage out, or untie the model's"
            " layers"
        )
    compiler = _compiler_of(config, definition, data, device.torch_device) if config.job.compile else None
    if compiler is not None:
        closing.callback(compiler.close)
    kept = _activation_cache(config, data, device, rank, secret, report)
    closing.callback(kept.end, done=False)
    return Equipment(
        config=config,
        rank=rank,
        host=host,
        definition=definition,
        data=data,
        reading=ReadAhead(device.torch_device, config.job.threads, config.job.seed),
        optimizer=optimizer,
        device=device,
        mailbox=mailbox,
        followers=Followers(),
        faults=faults,
        activity=activity,
        kept=kept,
        check=LayerCheck(lambda text: report(WarningReport(rank=rank, text=text)), config.job.precision),
        compiler=compiler,
        rescues=rescues,
        report=report,
        log_sha256=log_sha256,
        observe=observe,
        surroundings=lambda: None if sampler is None else sampler.newest,
    )


def _compiler_of(
    config: WorkerConfig, definition: ModelDefinition, data: OpenData, device: torch.device
) -> Compiler:
    """The compiler of a rank of the job that `config` describes."""

    def read() -> Tensors:
        batch = data.dataset.train(list(range(config.pipeline.microbatch_size)))
        return tuple(tensor.to(device) for tensor in batch.inputs)

    return Compiler(
        definition, read, precision=config.job.precision, device=device, threads=config.job.threads
    )


def _activation_cache(
    config: WorkerConfig,
    data: OpenData,
    device: Device,
    rank: int,
    secret: bytes,
    report: Callable[[Report], None],
) -> ActivationCache:
    """The rank's kept activations, by `freeze.cache`."""
    freeze, dataset, folders = config.freeze, data.dataset, None
    if freeze.cache != "off":
        folders = CacheFolders(
            config.job.folder,
            None if freeze.cache == "auto" else Path(freeze.cache),
            freeze.cache_bytes,
            freeze.cache_disk_bytes,
        )
        folders.check()
    subject = CacheSubject(
        identity={
            "model": config.model.model_dump(mode="json"),
            "data": config.data.model_dump(mode="json"),
            "tokens": data.sha256,
            "source": code_of_source(config.data.source),
            "samples": [dataset.train_samples, dataset.validation_samples],
            "rows": config.pipeline.microbatch_size,
            "seed": config.job.seed,
            "precision": config.job.precision,
            "compiled": config.job.compile,
            "threads": config.job.threads,
            "arithmetic": arithmetic(config.device),
        },
        held_out_from=dataset.train_samples,
        compares=":" in config.data.source,
        why_not="the samples are drawn anew in each epoch (augmentation)" if draws_anew(dataset) else "",
    )
    return ActivationCache(
        folders,
        subject,
        rank=rank,
        device=device.torch_device,
        report=report,
        secret=secret,
        takes_s=device.forward_s,
    )
