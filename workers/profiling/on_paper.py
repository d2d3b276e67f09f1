"""The profile of a job on devices that are not there: the passes of training on tensors without values, timed by
published figures.

The layers, their deferral and what they keep are those of training; only the clock is made up. Links are given, not
probed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.accelerators import Accelerator
from planner.ir import Action
from planner.profile import Cluster, DeviceProfile, Link, ModelProfile, Profile
from planner.shards import first_of_ties
from workers.build import assembled
from workers.config import WorkerConfig
from workers.data.dataset import Batch, OpenData
from workers.devices.device import Device
from workers.layers.deferred.queue import Workspace
from workers.layers.loss import Loss
from workers.models.definition import ModelDefinition
from workers.models.outline import sketch
from workers.profiling.chain import Chain, Flight
from workers.profiling.cost_settings import cost_settings
from workers.profiling.layer_bytes import count_bytes
from workers.profiling.layer_times import LayerTimes
from workers.profiling.profiler import MICROBATCHES, layer_profile
from workers.profiling.roofline import FusedAttention, Roofline
from workers.profiling.stopwatch import Stopwatch
from workers.protocol.reports import ActionSpan
from workers.state.optim import Optimizer, make_optimizer

META = torch.device("meta")


class PaperDevice(Device):
    """A device on which actions take the roofline's time."""

    def __init__(self, clock: Roofline) -> None:
        self.torch_device = META
        self._clock = clock
        self._begun_s = 0.0
        self._spans: list[ActionSpan] = []

    def start_window(self) -> None:
        self._spans = []

    def begin(self) -> None:
        self._begun_s = self._clock.now_s

    def end(self, action: Action, layers: Sequence[int], frozen: Sequence[float] = ()) -> None:
        self._spans.append(ActionSpan(action=str(action), start_s=self._begun_s, end_s=self._clock.now_s))

    def spans(self) -> tuple[ActionSpan, ...]:
        return tuple(self._spans)


def profile_on_paper(
    config: WorkerConfig,
    definition: ModelDefinition,
    data: OpenData,
    accelerator: Accelerator,
    devices: Sequence[DeviceProfile],
    link: Link,
) -> Profile:
    """The profile of a job's model on `devices`, all of them an `accelerator`, its `key` and `source` still empty.

    Args:
        config: as for a measurement.
        link: between any two of them.

    Raises:
        JobError: a layer does not work without values.
    """
    optimizer = make_optimizer(config.optimizer, config.job.steps)
    chain = _chain(config, definition, optimizer)
    batch = _on_paper(data.dataset.train(list(range(config.pipeline.microbatch_size))))

    def begin(microbatch: int) -> Flight:
        return Flight(microbatch, batch.inputs, batch.targets)

    with FusedAttention():
        counted = count_bytes(chain, lambda: begin(0), fresh=True)
        chain.forget_gradients()
        with Roofline(accelerator) as clock:
            times = LayerTimes(chain, Stopwatch(PaperDevice(clock)), optimizer, begin, lambda _: None, ())
            # As in a step, the first microbatch's gradients are formed and later ones added.
            times.repeat(min(MICROBATCHES, config.microbatches))
    tied = first_of_ties(definition.tied_layers)
    return Profile(
        model=ModelProfile(
            layers=tuple(
                layer_profile(chain, times, number, one, tied.get(number))
                for number, one in enumerate(counted)
            ),
            microbatch_size=config.pipeline.microbatch_size,
            precision=config.job.precision,
            threads=config.job.threads,
            settings=cost_settings(config),
        ),
        cluster=_cluster(devices, link),
        key="",
        source="",
    )


def _chain(config: WorkerConfig, definition: ModelDefinition, optimizer: Optimizer) -> Chain:
    """The model's layers and loss without values."""
    precision, workspace = config.job.precision, Workspace()
    layers = [
        assembled(
            index,
            builder.name,
            sketch(builder).to(META),
            precision=precision,
            device=META,
            optimizer=optimizer,
            workspace=workspace,
        )
        for index, builder in enumerate(definition.layers)
    ]
    return Chain(
        layers, Loss(layers[-1][0], definition.loss, precision=precision, device=META), config.job.seed
    )


def _cluster(devices: Sequence[DeviceProfile], link: Link) -> Cluster:
    # Every record goes once around.
    commit_s = (len(devices) - 1) * link.latency_s
    return replace(Cluster.uniform(devices[0], len(devices), link, commit_s=commit_s), devices=tuple(devices))


def _on_paper(batch: Batch) -> Batch:
    inputs, targets = (tuple(tensor.to(META) for tensor in part) for part in (batch.inputs, batch.targets))
    return Batch(inputs, targets)
