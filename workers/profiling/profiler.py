"""Measures what a job costs with the passes that training makes, on all ranks at the same time.

`layer_times.py` times layers, `layer_bytes.py` counts what they keep, `link_probe.py` probes links and commits,
`stream_probe.py` states that travel. This module gives them a model's layers, all at once or part by part, and keeps
the ranks in step.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from planner.ir import ActionKind
from planner.profile import DeviceProfile, LayerProfile, Matrix
from planner.shards import first_of_ties
from workers.build import build_layers
from workers.config import WorkerConfig
from workers.data.dataset import Batch, OpenData
from workers.data.read_ahead import SLOW_READS, ReadTime, timed
from workers.data.sampling import samples_at
from workers.devices.device import Device
from workers.devices.machine import cpu_name, host_memory_bytes
from workers.layer_check.check import LayerCheck
from workers.layers.compiler import Compiler
from workers.layers.layer import Tensors
from workers.layers.loss import Loss
from workers.models.definition import ModelDefinition
from workers.models.outline import outline
from workers.process.pinned_memory import to_device
from workers.profiling.chain import Chain, Flight
from workers.profiling.layer_bytes import LayerBytes, count_bytes
from workers.profiling.layer_times import LayerTimes
from workers.profiling.link_probe import probe_commit, probe_links
from workers.profiling.measured import Measured, ProcessorLoad
from workers.profiling.stopwatch import Stopwatch
from workers.profiling.stream_probe import probe_streams
from workers.sampling.host import HostReader
from workers.sampling.readings import Reading
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer
from workers.state.precision import boundary_dtype
from workers.transport.channel import Channel

BUDGET_S = 2.5
"""Time to measure the layers after a warm-up."""
REPEATS = 5
"""Repeats at least, however long they take."""
MOST_REPEATS = 100
MICROBATCHES = 4
"""Microbatches of a repeat. On an emulated device, whose times are given, one is enough."""
SHARE = 0.5
"""Share of a rank's memory that the layers measured together may take; a larger model is measured part by part."""
MOST_READS = 4 * SLOW_READS
"""Reads that may show nothing are made again, so often in all."""


@dataclass(frozen=True)
class BatchReading:
    """The reads of one job: a rank waits for each, or with read-ahead for what compute does not hide of it."""

    ahead: bool
    """Whether they are made ahead of training."""
    seconds: float
    """Time of one read."""
    computed_s: float
    """Processor time that one read takes, within `seconds`, from a rank which computes on the host."""

    def left_s(self, work_s: float) -> float:
        """Extra time of a rank for a microbatch, beside `work_s` of work on it, where reads are made ahead."""
        return max(self.computed_s, self.seconds - work_s)


@dataclass(frozen=True, kw_only=True)
class ProfiledJob:
    """Job to measure on one rank, and the means to measure it."""

    config: WorkerConfig
    rank: int
    definition: ModelDefinition
    data: OpenData
    device: Device
    optimizer: Optimizer
    channel: Channel
    host: str
    """Address at which this rank serves states."""
    compiler: Compiler | None = None
    """Compiles the layers that are timed."""
    check: LayerCheck
    """Compares them with plain autograd first."""

    def read(self, microbatch: int) -> Batch:
        """A microbatch of the first step, read as training reads it, on the device."""
        config, dataset = self.config, self.data.dataset
        total = config.microbatches * config.pipeline.replicas
        positions = config.course().positions(1, microbatch % total)
        batch = dataset.train(samples_at(config.job.seed, positions, dataset.train_samples))
        return Batch(self._on_device(batch.inputs), self._on_device(batch.targets))

    def _on_device(self, tensors: Iterable[Tensor]) -> Tensors:
        return tuple(to_device(tensor, self.device.torch_device) for tensor in tensors)


def measure(subject: ProfiledJob, budget_s: float = BUDGET_S) -> Measured:
    """Measure layers, links and commit. All ranks of the channel call it together.

    Raises:
        ChannelError: another rank is gone.
        JobError: a layer does not work.
    """
    device = _describe_device(subject.config.device, subject.device.torch_device, subject.channel)
    memories = subject.channel.all_gather(str(device.memory_bytes).encode())
    limit_bytes = int(min(map(int, memories)) * SHARE)
    before = HostReader().read()
    profiles, repeats_s, times = _measure_layers(subject, budget_s, limit_bytes)
    load = _load(before, HostReader().read())
    streams = device.kind == "cpu" and subject.channel.size > 1
    compute = partial(times.repeat, 1) if streams else None
    del times  # and with them the layers, unless they compute again
    sizes = [size for layer in profiles for size in (layer.boundary_bytes, layer.boundary_grad_bytes) if size]
    sleeps = subject.config.device == "emulated"
    links = probe_links(subject.channel, sizes, subject.device.torch_device, device.machine, sleeps=sleeps)
    if compute is not None:
        traffic = probe_streams(subject.channel, subject.host, device.machine, links, compute, budget_s)
        if traffic is not None:
            device = replace(device, **traffic._asdict())
    return Measured(
        rank=subject.rank,
        layers=tuple(profiles),
        checked={*subject.check.names} == {*subject.definition.names},
        repeats_s=tuple(repeats_s),
        device=device,
        links=links,
        commit_s=probe_commit(subject.channel, len(profiles), subject.config.microbatches, sleeps=sleeps),
        receives_ahead=subject.channel.receives_ahead,
        sends_kept=subject.channel.sends_kept,
        load=load,
    )


def _describe_device(kind: str, device: torch.device, channel: Channel) -> DeviceProfile:
    """This rank's device. Ranks on one GPU, or in one host's memory, share it equally; all of them call this."""
    machine = socket.gethostname()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes, place = properties.name, properties.total_memory, f"{machine} {properties.uuid}"
    else:
        name, memory_bytes, place = cpu_name(), host_memory_bytes(), machine
    places = [json.loads(record) for record in channel.all_gather(json.dumps(place).encode())]
    return DeviceProfile(
        kind=kind, name=name, memory_bytes=memory_bytes // places.count(place), machine=machine
    )


def _load(before: Reading, after: Reading) -> ProcessorLoad | None:
    """The load of this rank's machine between two readings; None: the machine does not tell."""
    if not before.cores_s or len(before.cores_s) != len(after.cores_s):
        return None
    if before.own_s is None or after.own_s is None:
        return None
    return ProcessorLoad(
        window_s=after.time_s - before.time_s,
        cores=len(after.cores_s),
        # Counters of idle time may go back by a tick.
        busy_s=sum(max(0.0, now - then) for then, now in zip(before.cores_s, after.cores_s, strict=True)),
        own_s=after.own_s - before.own_s,
    )


def _measure_layers(
    subject: ProfiledJob, budget_s: float, limit_bytes: int
) -> tuple[list[LayerProfile], list[float], LayerTimes]:
    """All layers' profiles; the computing time of each repeat, summed over the parts; and the times of the last part,
    which keep its layers.

    Args:
        limit_bytes: of memory for one part, the same on all ranks.
    """
    count = len(subject.definition.layers)
    batch = subject.read(0)
    inputs = batch.inputs
    reads = reading(subject.read, subject.device.torch_device)
    profiles: list[LayerProfile] = []
    totals_s: list[float] = []
    times: LayerTimes | None = None
    while len(profiles) < count:
        chain = _next_part(subject, len(profiles), limit_bytes)

        def begin(microbatch: int, inputs: Tensors = inputs) -> Flight:
            return Flight(microbatch, inputs, batch.targets)

        share_s = budget_s * len(chain.layers) / count
        times = None  # the layers of the part before go
        part, times = _measure_part(subject, chain, begin, reads, share_s, limit_bytes)
        profiles += part
        repeats_s = [*times.repeats_s]
        totals_s = [a + b for a, b in zip(totals_s, repeats_s, strict=False)] if totals_s else repeats_s
        inputs = _outputs(chain, begin(0))
    assert times is not None  # a model has layers
    return profiles, totals_s, times


def _next_part(subject: ProfiledJob, first: int, limit_bytes: int) -> Chain:
    """The layers from `first` on that fit, one at least."""
    config, definition = subject.config, subject.definition
    outlines = outline(definition)
    copies = 2.0 + len(subject.optimizer.slot_names())  # weights, gradients, optimizer state
    if boundary_dtype(config.job.precision) is not None:
        copies += 0.5  # casts
    stop, size = first, 0.0
    while stop < len(outlines):
        size += copies * outlines[stop].parameter_bytes
        if stop > first and size > limit_bytes:
            break
        stop += 1
    built = build_layers(
        definition,
        range(first, stop),
        seed=config.job.seed,
        precision=config.job.precision,
        device=subject.device.torch_device,
        optimizer=subject.optimizer,
    )
    loss = None
    if stop == len(outlines):
        last, device = built[stop - 1][0], subject.device.torch_device
        loss = Loss(last, definition.loss, precision=config.job.precision, device=device)
    return Chain(
        [built[index] for index in range(first, stop)],
        loss,
        config.job.seed,
        subject.check,
    )


def _measure_part(
    subject: ProfiledJob,
    chain: Chain,
    begin: Callable[[int], Flight],
    reads: BatchReading,
    budget_s: float,
    limit_bytes: int,
) -> tuple[list[LayerProfile], LayerTimes]:
    """The profiles of one part's layers, and their times."""
    grads = tuple(torch.randn_like(t) / t.numel() for t in _outputs(chain, begin(0)) if t.requires_grad)
    counted = count_bytes(chain, lambda: begin(0), fresh=chain.layers[0].index == 0)
    chain.forget_gradients()
    if subject.compiler is not None:
        # Not before: what a compiled function allocates is not to be counted, and is hardly more. Then the compiled
        # layers are compared with plain autograd too, as they first run.
        subject.compiler.compile(chain.layers)
    kept = sum(one.activation_bytes for one in counted) or 1
    most = 1 if subject.config.device == "emulated" else MICROBATCHES
    microbatches = max(1, min(most, limit_bytes // kept))
    read = None if reads.ahead else subject.read
    times = LayerTimes(chain, Stopwatch(subject.device), subject.optimizer, begin, read, grads)

    def repeat() -> float:
        """Make a repeat once all ranks are there; returns the longest rank's time, the same on every rank."""
        begun_s = time.perf_counter()
        times.repeat(microbatches)
        spent_s = time.perf_counter() - begun_s
        return max(map(float, subject.channel.all_gather(repr(spent_s).encode())))

    repeat()
    times.forget()
    spent_s = 0.0
    while len(times.repeats_s) < REPEATS or (spent_s < budget_s and len(times.repeats_s) < MOST_REPEATS):
        spent_s += repeat()
    numbers = range(len(chain.layers))
    tied = first_of_ties(subject.definition.tied_layers)
    profiles = [
        layer_profile(chain, times, number, counted[number], tied.get(chain.layers[number].index))
        for number in numbers
    ]
    if reads.ahead:
        left_s = reads.left_s(sum(one.forward_s + one.backward_s for one in profiles))
        profiles = [
            replace(one, forward_s=one.forward_s + left_s) if chain.reads(number) else one
            for number, one in enumerate(profiles)
        ]
    return profiles, times


def _outputs(chain: Chain, flight: Flight) -> Tensors:
    """Outputs of the chain's last layer, or the loss after it."""
    for number in range(len(chain.layers)):
        chain.forward(number, flight)
    return flight.tensors


def layer_profile(
    chain: Chain, times: LayerTimes, number: int, counted: LayerBytes, tied_from: int | None = None
) -> LayerProfile:
    """Layer `number` of the chain, as timed and counted.

    Args:
        tied_from: as in `LayerProfile`.
    """
    layer, state = chain.layers[number], chain.states[number]
    accumulators = [one.accumulator for one in times.formed(number) if one.accumulator is not None]
    weight_grad_s = times.seconds(ActionKind.WEIGHT_GRAD, number)
    casts = [flat.cast for flat in state.flats if flat.cast is not None]
    cast_bytes = sum(cast.nbytes for cast in casts) + sum(one.cast_bytes for one in accumulators)
    trained = [place.stop - place.begin for flat in state.flats for place in flat.layout.places]
    return LayerProfile(
        name=layer.name,
        forward_s=times.seconds(ActionKind.FORWARD, number),
        input_grad_s=times.seconds(ActionKind.INPUT_GRAD, number),
        weight_grad_s=weight_grad_s,
        update_s=times.seconds(ActionKind.UPDATE, number),
        parameters=sum(weight.numel() for weight in state.weights.values()),
        parameter_bytes=_weight_bytes(state) + cast_bytes,
        cast_bytes=cast_bytes,
        gradient_bytes=sum(state.weights[name].nbytes for name in state.updates),
        optimizer_bytes=sum(slot.nbytes for slots in state.slots.values() for slot in slots.values()),
        **asdict(counted),
        matrices=_matrices(chain, times, number, weight_grad_s),
        uncovered=() if layer.whole else layer.uncovered,
        whole=layer.whole,
        trained=tuple(trained),
        tied_from=tied_from,
    )


def _matrices(chain: Chain, times: LayerTimes, number: int, weight_grad_s: float) -> tuple[Matrix, ...]:
    """Matrices whose gradients W forms, with shares of `weight_grad_s`: as measured if told apart, else by scalars."""
    layer, formed = chain.layers[number], times.formed(number)
    groups = [
        [layer.module.get_parameter(name) for name in layer.uncovered]
        if one.accumulator is None
        else [one.accumulator.parameter]
        for one in formed
    ]
    scalars = [sum(parameter.numel() for parameter in group) for group in groups]
    shares = [
        count if one.seconds is None else one.seconds for one, count in zip(formed, scalars, strict=True)
    ]
    whole = sum(shares) or 1.0
    names = {id(parameter): name for name, parameter in layer.module.named_parameters()}
    return tuple(
        Matrix(
            name=names[id(parameter)],
            parameters=parameter.numel(),
            weight_grad_s=weight_grad_s * share / whole * parameter.numel() / count,
            shape=tuple(parameter.shape),
            scratch_bytes=0 if one.accumulator is None else one.accumulator.scratch_bytes,
        )
        for one, group, share, count in zip(formed, groups, shares, scalars, strict=True)
        for parameter in group
    )


def _weight_bytes(state: LayerState) -> int:
    return sum(tensor.nbytes for tensor in (*state.weights.values(), *state.buffers.values()))


def reading(read: Callable[[int], object], device: torch.device) -> BatchReading:
    """Time some reads, by the rule of training (`workers.data.read_ahead`)."""
    reads: list[ReadTime] = []
    decided: list[bool] = []
    while len(decided) < SLOW_READS and len(reads) < MOST_READS:
        number = len(reads)
        reads.append(timed(lambda number=number: read(number), device)[1])
        decided += [] if reads[-1].slow is None else [reads[-1].slow]
    return BatchReading(
        ahead=len(decided) == SLOW_READS and all(decided),
        seconds=median(one.seconds for one in reads),
        computed_s=0.0 if device.type == "cuda" else median(one.computed_s for one in reads),
    )
