"""One step's gradients, up to the commit: the windows of this pipeline's replicas, and the sums across ranks.

With fewer pipelines than replicas, a pipeline runs its replicas' windows one after the other, each from the same
buffers: sums have the order, and so the bits, of one pipeline per replica. With uneven shares it runs one window. A
`GradientSink` takes the gradients as windows form them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from planner.course import Course
from planner.ir import ActionKind
from planner.shards import kept_whole
from workers.activation_cache.cache import ActivationCache
from workers.checkpoint.collecting import Collector
from workers.commit.freezing_scores import Energy, Moves, total_of
from workers.config import WorkerConfig
from workers.data.dataset import Batch, Dataset, stream_of, takes_draws
from workers.data.read_ahead import ReadResult, WantedRead
from workers.data.sampling import train_places
from workers.freezing.freezer import Freezer
from workers.gradients.exchange import Parameters, TiedUse, TieExchange
from workers.gradients.sink import GradientSink
from workers.layers.sharded_weights import WeightExchange
from workers.reproducibility import rng
from workers.step.engine import Engine, Window
from workers.step.generation import GenerationSetup, make_stages, tied_uses
from workers.transport.channel import Channel, MessageStream

Buffers = Mapping[int, Mapping[str, Tensor]]
"""Layer -> buffer -> value."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Statistics by layer: the fields of `CommitRecord` with these names. Empty where a sibling tells the same."""

    squared_norms: dict[int, float] = field(default_factory=dict)
    parameter_norms: dict[int, dict[str, float]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    moves: dict[int, dict[str, Moves]] = field(default_factory=dict)
    stable: dict[int, int] = field(default_factory=dict)
    energies: dict[int, Energy] = field(default_factory=dict)
    parameter_energies: dict[int, dict[str, Energy]] = field(default_factory=dict)


class Minibatch:
    """One rank's computation of each step of a generation.

    Args:
        sink: takes the gradients of all the rank's stages.
        admit: as the engine's.
    """

    def __init__(
        self,
        setup: GenerationSetup,
        freezer: Freezer,
        channel: Channel,
        sink: GradientSink,
        admit: Callable[[], None] | None = None,
    ) -> None:
        self._setup = setup
        self._channel = channel
        self._freezer = freezer
        self._sink = sink
        tags = setup.tags
        parameters: Parameters = {
            (index, name): parameter
            for index, (layer, _) in sorted(setup.layers.items())
            for name, parameter in sorted(layer.module.named_parameters())
        }
        self._stages = make_stages(setup, freezer, sink)
        self.engine = Engine(
            setup.program,
            setup.pipeline,
            self._stages,
            sink,
            channel,
            setup.device,
            setup.faults,
            setup.activity,
            admit,
        )
        last = setup.program.stages - 1
        self._reads = [
            (action.index, action.stage == 0, action.stage == last)
            for action in setup.program.actions
            if action.kind is ActionKind.FORWARD and action.stage in (0, last)
        ]
        """A window's reads in the order of its actions: microbatch, whether inputs and whether targets are needed."""
        self._draws = takes_draws(setup.data.dataset)
        self.follow(setup.config.course())
        self.samples: dict[int, list[int]] = {}
        """Global microbatch -> the samples read for it in the newest step."""
        groups = tied_uses(setup)
        self._tied = {use.layer for group in groups for use in group}
        repeated = {(use.layer, use.name) for group in groups for use in group[1:]}
        self.counted = {place: p for place, p in parameters.items() if place not in repeated}
        """The parameters, a tied one in the first layer that uses it."""
        base = setup.place - setup.pipeline_rank
        self._ties = TieExchange(channel, _met_here(groups, setup), parameters, base, tags.ties)
        shared = {i: layer.shared for i, (layer, _) in setup.layers.items() if layer.shared is not None}
        self.weights = WeightExchange(channel, setup.siblings, shared, tags.weights)
        """The weights that the rank computes with."""
        states = {index: state for index, (_, state) in setup.layers.items() if index in shared}
        self.shards = Collector(channel, setup.siblings, states, shared, tags.shards)
        """Whole layers, where siblings share out their states."""

    def follow(self, course: Course) -> None:
        """Follow `course` from the next step on. What was read ahead is read again."""
        setup, self.course = self._setup, course
        self._last_step = course.last_step(setup.config.job.steps)
        # Of no layer: a thread may hold it longer than the rank holds these.
        self._read = partial(_read, setup.config, setup.data.dataset, self._draws, course, setup.kept)

    @property
    def untouched(self) -> frozenset[int]:
        """Layers whose weights the step at hand does not change: those below the prefix without a tied parameter."""
        return frozenset(range(self._freezer.prefix)) - self._tied

    @property
    def reads_samples(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self._stages

    def run(self, step: int, loss_scale: float = 1.0) -> tuple[Window, Buffers]:
        """Compute the step after `step` committed ones. The gradients are then final.

        Args:
            loss_scale: factor on the loss, and so on all gradients until they are summed up.

        Returns:
            The windows as one, and the buffers to commit where they differ from the live ones: those hold the values
            of this pipeline's own replicas.

        Raises:
            ChannelError: a rank is gone.
        """
        self.samples = {}
        self._sink.begin_step(self._freezer.prefix)
        for layer in self.untouched & self._setup.layers.keys():
            self._setup.layers[layer][0].summed.free()
        self.weights.bring()
        self._begin_kept(step)
        self._setup.reading.begin(self._wanted(step), self._read)
        for stage in self._stages.values():
            if stage.loss is not None:
                stage.loss.scale = loss_scale
        window = self._run_windows(step)
        self._sink.reduce()
        buffers = self._first_replicas_buffers()
        self._ties.sum()
        if loss_scale != 1.0:
            for layer, _ in self._setup.layers.values():
                for summed in layer.gradients().buffers:
                    summed.mul_(1.0 / loss_scale)
        return window, buffers

    def _begin_kept(self, step: int) -> None:
        """Have what the first stage's frozen layers make kept, up to the first that another layer's gradient trains."""
        first, setup = self._stages.get(0), self._setup
        final = self.untouched - {piece.layer for piece, _ in setup.held}
        layers = () if first is None else first.layers
        config, data = setup.config, setup.data.dataset
        epoch, last = (self.course.epoch(n, data.train_samples) for n in (step + 1, self._last_step))
        setup.kept.begin(
            tuple(takewhile(lambda layer: layer.index in final, layers)),
            step + 1,
            training=self._freezer.frozen_mode == "train",
            again=(epoch < last, bool(config.job.validate_every) and step + 1 < self._last_step),
            frozen=self._freezer.prefix > 0,
        )

    def _run_windows(self, step: int) -> Window:
        """Run the windows, each from the same buffers. Those of the first are then live."""
        own = self._setup.windows
        if not own:  # there are more pipelines than replicas: the step is one of before the batch grew
            return Window({}, ())
        before = {} if len(own) == 1 else self.copied_buffers()
        begun_s = time.perf_counter()
        self._sink.begin_window()
        window = self.engine.run(step, self._batches(step, own[0]), own[0])
        first = {} if len(own) == 1 else self.copied_buffers()
        for numbers in own[1:]:
            self.load_buffers(before)
            self._sink.begin_window()
            offset_s = time.perf_counter() - begun_s
            further = self.engine.run(step, self._batches(step, numbers), numbers)
            window = window.followed_by(further, offset_s)
        self.load_buffers(first)
        return window

    def findings(self) -> Findings:
        """Look at the gradients of the step at hand, and check what is stable if that is due."""
        setup, norms = self._setup, self._norms()
        checked, stable = self._freezer.check()
        energies = self._freezer.energies(norms)
        of_layers = dict.fromkeys(setup.layers, 0.0)
        of_parameters: dict[int, dict[str, float]] = {layer: {} for layer in setup.layers}
        for (layer, name), norm in norms.items():
            of_layers[layer] += norm
            of_parameters[layer][name] = norm
        if setup.plan.shards > 1:
            return Findings(
                parameter_norms=of_parameters,
                scores=checked.scores,
                moves=checked.moves,
                stable=stable,
                parameter_energies=energies,
            )
        if setup.pipeline != 0:
            return Findings()
        return Findings(
            squared_norms=of_layers,
            scores=checked.scores,
            moves=checked.moves,
            stable=stable,
            energies={layer: total_of(of_layer.values()) for layer, of_layer in energies.items()},
        )

    def _norms(self) -> dict[tuple[int, str], float]:
        """The float64 squared norm of each parameter's gradient, by (layer, parameter) in name order; with shards, of
        those of the own ones. A tied parameter counts in the first layer that uses it."""
        if self._setup.pipeline and not self._freezer.on and self._setup.plan.shards == 1:
            return {}  # the first pipeline's stand in the commit; freezing statistics are every sibling's
        gradients = {index: layer.gradients() for index, (layer, _) in self._setup.layers.items()}
        found = {
            (index, name): torch.linalg.vector_norm(gradients[index][name], dtype=torch.float64)
            for index, name in self.counted
            if name in gradients[index]
        }
        if not found:
            return {}
        # All at once: on a GPU, reading each number would wait for the device.
        norms: list[float] = torch.stack(tuple(found.values())).tolist()
        return {place: norm * norm for place, norm in zip(found, norms, strict=True)}

    def drop(self) -> None:
        """Drop the microbatches in flight, and all gradients."""
        for stage in self._stages.values():
            stage.drop()
        self._sink.drop()

    def copied_buffers(self) -> dict[int, dict[str, Tensor]]:
        return {
            index: {name: buffer.clone() for name, buffer in state.buffers.items()}
            for index, (_, state) in self._setup.layers.items()
        }

    def load_buffers(self, buffers: Buffers) -> None:
        for index, values in buffers.items():
            for name, value in values.items():
                self._setup.layers[index][1].buffers[name].copy_(value)

    def _first_replicas_buffers(self) -> Buffers:
        """The buffers after the first replica's microbatches, which all siblings adopt."""
        received: dict[int, dict[str, Tensor]] = {}
        setup = self._setup
        first, *others = setup.siblings
        for index, (_, state) in sorted(setup.layers.items()):
            if not state.buffers:
                continue
            names = sorted(state.buffers)
            for target in others:
                stream = MessageStream(first, target, setup.tags.buffers + index, f"buffers of layer {index}")
                if setup.place == first:
                    self._channel.send(stream, [state.buffers[name].clone() for name in names])
                elif setup.place == target:
                    received[index] = dict(zip(names, self._channel.receive(stream), strict=True))
        self._channel.flush()
        return received

    def _batches(self, step: int, numbers: Sequence[int]) -> Callable[[int], Batch]:
        def batch(microbatch: int) -> Batch:
            index = numbers[microbatch]
            found = self._setup.reading.collect(step, index)
            self.samples[index] = found.samples
            return replace(found.batch, samples=tuple(found.samples))

        return batch

    def _wanted(self, step: int) -> list[WantedRead]:
        """Reads of the step after `step` committed ones; and the first read of the step that follows, unless held-out
        samples are read before it."""
        every = self._setup.config.job.validate_every
        ends = step + 1 == self._last_step or (every and (step + 1) % every == 0)
        return [*self._reads_of(step), *(() if ends else self._reads_of(step + 1)[:1])]

    def _reads_of(self, step: int) -> list[WantedRead]:
        return [
            WantedRead(step, numbers[index], inputs, targets, self._setup.kept.depth if inputs else 0)
            for numbers in self._setup.windows
            for index, inputs, targets in self._reads
        ]


def _read(
    config: WorkerConfig,
    dataset: Dataset,
    draws: bool,
    course: Course,
    kept: ActivationCache,
    wanted: WantedRead,
) -> ReadResult:
    places = train_places(
        config.job.seed,
        course.positions(wanted.step + 1, wanted.microbatch),
        stream_of(dataset, config.data.buckets, course),
        config.data.shuffle,
    )
    samples = [sample for _, sample in places]
    found = kept.find(samples) if wanted.through else None
    if found is not None and not wanted.targets:
        return ReadResult(samples, Batch(found[1], (), through=found[0]))
    inputs = wanted.inputs and found is None
    train: Any = dataset.train if inputs else getattr(dataset, "train_targets", dataset.train)
    keys = ([rng.key(config.job.seed, "sample", *place) for place in places],) if draws else ()
    batch = train(samples, *keys)
    if found is not None:
        return ReadResult(samples, replace(batch, inputs=found[1], through=found[0]))
    if wanted.through and not draws:
        kept.check_samples(samples, batch.inputs, lambda alone: train(alone).inputs)
    return ReadResult(samples, batch)


def _met_here(groups: Sequence[Sequence[TiedUse]], setup: GenerationSetup) -> list[Sequence[TiedUse]]:
    """The tied parameters of which a pipeline has the sums over replicas: all of them, or those of its shards."""
    shards = setup.plan.shards
    at = kept_whole(setup.definition.tied_layers, shards)
    return [group for group in groups if shards == 1 or at[group[0].layer] == setup.pipeline]
