"""One step's gradients, up to the commit: the windows of this pipeline's replicas, and the sums across ranks.

With fewer pipelines than replicas, a pipeline runs its replicas' windows one after the other, each from the
same buffers and with its own gradients: sums have the order, and so the bits, of one pipeline per replica. With
uneven shares it runs one window, in which the gradients of its parts of replicas are kept apart. Where siblings share
out the sums of gradients, these are formed during the windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from planner.ir import FREEZABLE, Kind
from planner.plan import Plan
from planner.rounds import busy_pipelines, executed_by
from planner.shards import kept_whole
from planner.shares import parts, parts_of
from workers.checkpoint.collecting import Collector
from workers.config import WorkerConfig
from workers.data.dataset import Batch, Dataset
from workers.data.read_ahead import Found, Wanted
from workers.data.sampling import train_indices
from workers.freezing.freezer import Freezer
from workers.gradients.exchange import Parameters, ReplicaExchange, TiedUse, TieExchange
from workers.gradients.fold import MicrobatchFold
from workers.gradients.parts import GradientParts
from workers.layers.sharded_weights import WeightExchange
from workers.step.engine import Engine, Leaving, Window, first_free_tag
from workers.step.generation import GenerationSetup, make_stages, tied_uses
from workers.transport.channel import Channel, Stream

Buffers = Mapping[int, Mapping[str, Tensor]]
"""Layer -> buffer -> value."""


class Minibatch:
    """One rank's computation of each step of a generation.

    Args:
        admit: as the engine's.
    """

    def __init__(
        self,
        setup: GenerationSetup,
        freezer: Freezer,
        channel: Channel,
        admit: Callable[[], None] | None = None,
    ) -> None:
        self._setup = setup
        self._channel = channel
        self._freezer = freezer
        plan, definition = setup.plan, setup.definition
        self._parameters: Parameters = {
            (index, name): parameter
            for index, (layer, _) in sorted(setup.layers.items())
            for name, parameter in sorted(layer.module.named_parameters())
        }
        summed = {index: layer.summed for index, (layer, _) in setup.layers.items()}
        self._siblings = plan.siblings(setup.pipeline_rank)
        shared = {i: layer.shared for i, (layer, _) in setup.layers.items() if layer.shared is not None}
        cuts = {index: weights.cuts for index, weights in shared.items()}
        groups = tied_uses(setup)
        # A tag means the same on both sides of a pair. The siblings' come last: their number differs.
        tie_tags = first_free_tag(setup.program.stages)
        self._buffer_tags = tie_tags + sum(len(group) for group in groups)
        self.free_tags = self._buffer_tags + len(definition.layers)
        """First free tag; one tag per layer of the model is free from here on."""
        replica_tags = self.free_tags + len(definition.layers)
        weight_tags = replica_tags + 1 + 2 * len(definition.layers)
        self._parts = self._fold = self._replicas = None
        if plan.shard == "gradients":
            self._fold = MicrobatchFold(
                channel,
                self._siblings,
                summed,
                replica_tags,
                cuts=cuts,
                executed_by=executed_by(plan) if plan.shares else (),
                device=setup.device,
                activity=setup.activity,
            )
        elif plan.replicas > 1:
            self._replicas = ReplicaExchange(channel, self._siblings, summed, replica_tags, parts(plan), cuts)
            if plan.shares:
                self._parts = GradientParts(parts_of(plan, setup.pipeline), plan.microbatches, summed)
        self._stages = make_stages(setup, freezer, self._fold or self._parts)
        self.engine = Engine(
            setup.program,
            setup.pipeline,
            self._stages,
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
            if action.kind is Kind.FORWARD and action.stage in (0, last)
        ]
        """A window's reads in the order of its actions: microbatch, whether inputs and whether targets are needed."""
        # Of no layer: a thread may hold it longer than the rank holds these.
        self._read = partial(_read, setup.config, setup.data.dataset, plan.replicas * plan.microbatches)
        self.samples: dict[int, list[int]] = {}
        """Global microbatch -> the samples read for it in the newest step."""
        repeated = {(use.layer, use.name) for group in groups for use in group[1:]}
        self.counted = {place: p for place, p in self._parameters.items() if place not in repeated}
        """The parameters, a tied one in the first layer that uses it."""
        self._ties = None
        if met := _met_here(groups, definition.tied_layers, plan, setup.pipeline):
            base = setup.place - setup.pipeline_rank
            self._ties = TieExchange(channel, met, self._parameters, base, tie_tags)
        self.weights = WeightExchange(channel, self._siblings, shared, weight_tags)
        """The weights that the rank computes with."""
        states = {index: state for index, (_, state) in setup.layers.items() if index in shared}
        self.shards = Collector(channel, self._siblings, states, shared, weight_tags + len(definition.layers))
        """Whole layers, where siblings share out their states."""

    @property
    def reads_samples(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self._stages

    def run(self, step: int, loss_scale: float = 1.0, final: Leaving | None = None) -> tuple[Window, Buffers]:
        """Compute the step after `step` committed ones. The gradients are then final.

        Args:
            loss_scale: factor on the loss, and so on all gradients until they are summed up.
            final: hears of layers whose gradients are final before the window ends; see `Engine.run`. Of none
                where gradients are summed up further after the window.

        Returns:
            The window, and the buffers to commit where they differ from the live ones: those hold the values
            of this pipeline's own replicas.

        Raises:
            ChannelError: a rank is gone.
        """
        self.samples = {}
        self._setup.reading.begin(self._wanted(step), self._read)
        buffers: Buffers
        self.weights.bring()
        if self._ties is not None or loss_scale != 1.0:
            final = None
        for stage in self._stages.values():
            if stage.loss is not None:
                stage.loss.scale = loss_scale
        if self._fold is not None:
            window, buffers = self._run_in_rounds(step, self._fold), {}
        elif self._replicas is None:
            batches = self._batches(step, range(self._setup.plan.microbatches))
            window = self.engine.run(step, batches, final=final)
            buffers = {}
        elif self._parts is not None:
            (numbers,) = self._setup.windows
            window = self.engine.run(step, self._batches(step, numbers), numbers)
            self._replicas.put(self._parts.take())
            self._replicas.sum()
            buffers = {}
        else:
            window, buffers = self._run_replicas(step, self._replicas)
        if self._ties is not None:
            self._ties.sum()
        if loss_scale != 1.0:
            for layer, _ in self._setup.layers.values():
                for summed in layer.gradients().buffers:
                    summed.mul_(1.0 / loss_scale)
        return window, buffers

    def _run_replicas(self, step: int, exchange: ReplicaExchange) -> tuple[Window, Buffers]:
        setup = self._setup
        begun_s = time.perf_counter()
        windows: list[Window] = []
        own = setup.windows
        before = first = {} if len(own) == 1 else self.copied_buffers()
        for numbers in own:
            if windows:
                self.load_buffers(before)
            offset_s = time.perf_counter() - begun_s
            window = self.engine.run(step, self._batches(step, numbers), numbers)
            exchange.take(numbers[0] // setup.plan.microbatches)
            windows.append(_later(window, offset_s))
            if len(windows) == 1 and len(own) > 1:
                first = self.copied_buffers()
        self.load_buffers(first)
        exchange.sum()
        return _together(windows), self._first_replicas_buffers()

    def _run_in_rounds(self, step: int, fold: MicrobatchFold) -> Window:
        setup = self._setup
        begun_s = time.perf_counter()
        windows: list[Window] = []
        own = setup.windows
        for number, busy in enumerate(busy_pipelines(setup.plan)):
            fold.begin(busy)
            if number < len(own):
                offset_s = time.perf_counter() - begun_s
                window = self.engine.run(step, self._batches(step, own[number]), own[number])
                windows.append(_later(window, offset_s))
                continue
            for action in setup.program.actions:
                if action.kind in FREEZABLE:
                    fold.pass_by(layer.index for layer in reversed(self._stages[action.stage].layers))
        fold.finish()
        return _together(windows)

    def norms(self) -> dict[tuple[int, str], float]:
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
        if self._parts is not None:
            self._parts.drop()
        if self._fold is not None:
            self._fold.drop()
        if self._replicas is not None:
            self._replicas.drop()

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
        own = self._setup.pipeline
        for index, (_, state) in sorted(self._setup.layers.items()):
            if not state.buffers:
                continue
            names = sorted(state.buffers)
            for target in self._siblings[1:]:
                stream = Stream(
                    self._siblings[0], target, self._buffer_tags + index, f"buffers of layer {index}"
                )
                if own == 0:
                    self._channel.send(stream, [state.buffers[name].clone() for name in names])
                elif target == self._setup.place:
                    received[index] = dict(zip(names, self._channel.receive(stream), strict=True))
        self._channel.flush()
        return received

    def _batches(self, step: int, numbers: Sequence[int]) -> Callable[[int], Batch]:
        def batch(microbatch: int) -> Batch:
            index = numbers[microbatch]
            found = self._setup.reading.take(step, index)
            self.samples[index] = found.samples
            return found.batch

        return batch

    def _wanted(self, step: int) -> list[Wanted]:
        """Reads of the step after `step` committed ones; and the first read of the step that follows, unless held-out
        samples are read before it."""
        config = self._setup.config
        every = config.validate_every
        ends = step + 1 == config.steps or (every and (step + 1) % every == 0)
        return [*self._reads_of(step), *(() if ends else self._reads_of(step + 1)[:1])]

    def _reads_of(self, step: int) -> list[Wanted]:
        return [
            Wanted(step, numbers[index], inputs, targets)
            for numbers in self._setup.windows
            for index, inputs, targets in self._reads
        ]


def _read(config: WorkerConfig, dataset: Dataset, total: int, wanted: Wanted) -> Found:
    samples = train_indices(
        config.seed, wanted.step, wanted.microbatch, total, config.microbatch_size, dataset.train_samples
    )
    return Found(samples, dataset.train(samples))


def _met_here(
    groups: Sequence[Sequence[TiedUse]], tied: Iterable[Iterable[int]], plan: Plan, pipeline: int
) -> list[Sequence[TiedUse]]:
    """The tied parameters of which a pipeline has the sums over replicas: all of them, or those of its shards.

    Args:
        tied: per tied parameter, the layers that use it.
    """
    at = kept_whole(tied, plan.shards)
    return [group for group in groups if plan.shards == 1 or at[group[0].layer] == pipeline]


def _together(windows: Sequence[Window]) -> Window:
    losses = {g: loss for window in windows for g, loss in window.losses.items()}
    spans = tuple(span for window in windows for span in window.spans)
    return Window(losses, spans, sum(window.waited_s for window in windows))


def _later(window: Window, offset_s: float) -> Window:
    """`window` with its times counted from the start of the step's first window."""
    spans = tuple(
        replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s) for span in window.spans
    )
    return replace(window, spans=spans)
