"""A rank's training loop in one generation: window, exchange, commit, update; then what a commit may ask for.

Nothing of a layer's state changes between two commits but its buffers, and those are put back if the step is not
committed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.ir import Schedule
from planner.plan import Plan
from workers.canonical import canonical
from workers.checkpointing import Checkpointing
from workers.commit import CommitRecord, Decision, settle
from workers.config import WorkerConfig
from workers.data.dataset import Batch, OpenData
from workers.data.sampling import train_indices, validation_indices, validation_windows
from workers.devices.device import Device
from workers.engine import Engine, Window
from workers.exchange import Parameters, ReplicaExchange, TiedUse, TieExchange
from workers.layer import Layer, Loss
from workers.layer_state import LayerState, digest
from workers.mailbox import Mailbox
from workers.models.definition import ModelDefinition
from workers.optim import Optimizer
from workers.protocol import (
    Generation,
    Outcome,
    Report,
    Request,
    SampleReport,
    StepReport,
    TimelineReport,
    ValidationReport,
)
from workers.sample_text import sample_text
from workers.stage import Stage
from workers.transport.channel import Channel, Stream

VALIDATION, SAMPLING = 1, 2
"""Purposes of forward passes outside training; see `Engine.evaluate`."""


@dataclass(frozen=True)
class Setting:
    """What a rank brings to a generation's training: all of it outlives the generation."""

    config: WorkerConfig
    rank: int
    plan: Plan
    schedule: Schedule
    definition: ModelDefinition
    data: OpenData
    layers: Mapping[int, tuple[Layer, LayerState]]
    optimizer: Optimizer
    device: Device
    mailbox: Mailbox
    report: Callable[[Report], None]

    @property
    def pipeline_rank(self) -> int:
        return self.rank % self.plan.pipeline_ranks

    @property
    def replica(self) -> int:
        return self.rank // self.plan.pipeline_ranks


class Training:
    """The loop of one rank.

    Args:
        step: steps committed so far.
    """

    def __init__(self, setting: Setting, generation: Generation, channel: Channel, step: int) -> None:
        self._setting = setting
        self._generation = generation
        self._channel = channel
        self.step = step
        config, plan = setting.config, setting.plan
        self._stages = _stages(setting)
        self._engine = Engine(
            setting.schedule, setting.pipeline_rank, setting.replica, self._stages, channel, setting.device
        )
        self._total = plan.replicas * plan.microbatches
        self._parameters: Parameters = {
            (index, name): parameter
            for index, (layer, _) in sorted(setting.layers.items())
            for name, parameter in sorted(layer.module.named_parameters())
        }
        base = setting.replica * plan.pipeline_ranks
        self._siblings = [r * plan.pipeline_ranks + setting.pipeline_rank for r in range(plan.replicas)]
        groups = _tied_uses(setting)
        # Tags mean the same on both sides of a pair: the siblings' own, whose number differs by rank, come last.
        tie_tags = self._engine.first_free_tag
        self._buffer_tags = tie_tags + sum(len(group) for group in groups)
        replica_tags = self._buffer_tags + len(setting.definition.layers)
        self._ties = TieExchange(channel, groups, self._parameters, base, tie_tags) if groups else None
        self._replicas = None
        if plan.replicas > 1:
            self._replicas = ReplicaExchange(channel, self._siblings, self._parameters, replica_tags)
        self._checkpointing = Checkpointing(
            config, setting.definition.names, plan, generation, setting.report
        )

    def run(self) -> Outcome:
        """Train until the last step or until a commit carries a STOP.

        Raises:
            ChannelError: a rank is gone. No step is half done: state is that of the last commit.
        """
        try:
            return self._run()
        finally:
            self._checkpointing.close()

    def _run(self) -> Outcome:
        config = self._setting.config
        stopped = False
        while self.step < config.steps and not stopped:
            begun_s = time.perf_counter()
            window, decision = self._step()
            step_s = time.perf_counter() - begun_s
            self._announce(decision, step_s)
            stopped = Request.STOP in decision.requests and self.step < config.steps
            last = stopped or self.step == config.steps
            if last or (config.timeline_every and self.step % config.timeline_every == 0):
                self._setting.report(
                    TimelineReport(step=self.step, rank=self._setting.rank, step_s=step_s, spans=window.spans)
                )
            every = config.checkpoint.every_steps
            if last or (every and self.step % every == 0) or Request.CHECKPOINT in decision.requests:
                self._checkpoint()
            if (
                config.validate_every and self.step % config.validate_every == 0
            ) or self.step == config.steps:
                self._validate()
        if not stopped and config.sample_tokens:
            self._sample()
        error = self._checkpointing.finish(self._channel, self._setting.rank, self.step)
        return Outcome(
            rank=self._setting.rank,
            step=self.step,
            stopped=stopped,
            layer_digests=tuple((i, digest(state)) for i, (_, state) in sorted(self._setting.layers.items())),
            checkpoint_error=error,
        )

    def _step(self) -> tuple[Window, Decision]:
        before = {
            index: {name: buffer.clone() for name, buffer in state.buffers.items()}
            for index, (_, state) in self._setting.layers.items()
        }
        committed = False
        try:
            window = self._engine.run(self.step, self._train_batch)
            if self._replicas is not None:
                self._replicas.sum()
            if self._ties is not None:
                self._ties.sum()
            buffers = self._first_replicas_buffers()
            decision = self._commit(window)
            committed = not decision.skipped
            if committed:
                self._update(decision, buffers)
        finally:
            for stage in self._stages.values():
                stage.drop()
            if not committed:
                self._load_buffers(before)
        self.step += 1
        return window, decision

    def _commit(self, window: Window) -> Decision:
        setting = self._setting
        files, errors = self._checkpointing.finished_files()
        record = CommitRecord(
            rank=setting.rank,
            generation=self._generation.number,
            step=self.step + 1,
            losses=window.losses,
            squared_norms=self._squared_norms() if setting.replica == 0 else {},
            busy_s=window.busy_s,
            requests=setting.mailbox.take(),
            files=files,
            files_errors=errors,
        )
        records = [CommitRecord.decode(r) for r in self._channel.all_gather(record.encode())]
        self._checkpointing.observe(records, setting.rank)
        return settle(
            records,
            microbatches=self._total,
            layers=len(setting.definition.layers),
            clip_norm=setting.config.optimizer.clip_norm,
        )

    def _squared_norms(self) -> dict[int, float]:
        """Per layer, the float64 sum in name order of its parameters' squared norms. A tied parameter counts in the
        first layer that uses it."""
        repeated = {(use.layer, use.name) for group in _tied_uses(self._setting) for use in group[1:]}
        norms = dict.fromkeys(self._setting.layers, 0.0)
        for (layer, name), parameter in self._parameters.items():
            if parameter.grad is not None and (layer, name) not in repeated:
                norm = float(torch.linalg.vector_norm(canonical(parameter.grad), dtype=torch.float64))
                norms[layer] += norm * norm
        return norms

    def _update(self, decision: Decision, buffers: dict[int, dict[str, Tensor]]) -> None:
        self._load_buffers(buffers)
        for layer, state in self._setting.layers.values():
            gradients = {n: p.grad for n, p in layer.module.named_parameters() if p.grad is not None}
            self._setting.optimizer.update_(state, gradients, decision.scale, self.step)

    def _first_replicas_buffers(self) -> dict[int, dict[str, Tensor]]:
        """The buffers that the first replica's microbatches left: siblings take those for their own."""
        received: dict[int, dict[str, Tensor]] = {}
        if self._replicas is None:
            return received
        own = self._setting.replica
        for index, (_, state) in sorted(self._setting.layers.items()):
            if not state.buffers:
                continue
            names = sorted(state.buffers)
            for target in self._siblings[1:]:
                stream = Stream(
                    self._siblings[0], target, self._buffer_tags + index, f"buffers of layer {index}"
                )
                if own == 0:
                    self._channel.send(stream, [state.buffers[name].clone() for name in names])
                elif target == self._setting.rank:
                    received[index] = dict(zip(names, self._channel.receive(stream), strict=True))
        self._channel.flush()
        return received

    def _load_buffers(self, buffers: Mapping[int, Mapping[str, Tensor]]) -> None:
        for index, values in buffers.items():
            for name, value in values.items():
                self._setting.layers[index][1].buffers[name].copy_(value)

    def _train_batch(self, microbatch: int) -> Batch:
        config, dataset = self._setting.config, self._setting.data.dataset
        index = self._setting.replica * self._setting.plan.microbatches + microbatch
        return dataset.train(
            train_indices(
                config.seed, self.step, index, self._total, config.microbatch_size, dataset.train_samples
            )
        )

    def _announce(self, decision: Decision, step_s: float) -> None:
        config = self._setting.config
        if self._setting.rank != 0:
            return
        samples = self._total * config.microbatch_size
        self._setting.report(
            StepReport(
                generation=self._generation.number,
                step=decision.step,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                lr=self._setting.optimizer.lr(decision.step - 1),
                samples=samples,
                tokens=samples * self._setting.data.tokens_per_sample,
                step_s=step_s,
                bubble=max(0.0, 1.0 - decision.busy_s / step_s),
                skipped=decision.skipped,
            )
        )

    def _checkpoint(self) -> None:
        if self._setting.replica == 0:
            self._checkpointing.start(self.step, [state for _, state in self._setting.layers.values()])
        else:
            self._checkpointing.start(self.step, [])

    def _validate(self) -> None:
        config, dataset, plan = self._setting.config, self._setting.data.dataset, self._setting.plan
        samples = dataset.validation_samples
        windows = validation_windows(
            samples, self._total * config.microbatch_size, config.data.validation_batches
        )
        if not windows:
            return
        losses: list[float] = []
        for window in range(windows):

            def batch(microbatch: int, window: int = window) -> Batch:
                index = self._setting.replica * plan.microbatches + microbatch
                return dataset.validation(
                    validation_indices(window, index, self._total, config.microbatch_size, samples)
                )

            results = self._engine.evaluate(batch, plan.microbatches, purpose=VALIDATION)
            losses += [float(loss) for _, (loss,) in sorted(results.items())]
        gathered = self._channel.all_gather(array("d", losses).tobytes())
        if self._setting.rank == 0:
            every = [loss for record in gathered for loss in memoryview(record).cast("d")]
            self._setting.report(ValidationReport(step=self.step, loss=sum(every) / len(every)))

    def _sample(self) -> None:
        setting = self._setting
        if not setting.definition.language or setting.data.tokenizer is None:
            return
        prompt, text = sample_text(
            self._engine,
            self._channel,
            setting.data,
            context=setting.config.model.context,
            tokens=setting.config.sample_tokens,
            seed=setting.config.seed,
            purpose=SAMPLING,
        )
        if setting.rank == 0:
            setting.report(SampleReport(step=self.step, prompt=prompt, text=text))


def _stages(setting: Setting) -> dict[int, Stage]:
    plan, config = setting.plan, setting.config
    stages: dict[int, Stage] = {}
    for stage in setting.schedule.stages_of_rank(setting.pipeline_rank):
        first, stop = plan.layers[stage]
        loss = None
        if stop == len(setting.definition.layers):
            loss = Loss(
                setting.definition.loss, precision=config.precision, device=setting.device.torch_device
            )
        layers = [setting.layers[index][0] for index in range(first, stop)]
        stages[stage] = Stage(layers, loss, frozenset(plan.recompute), config.seed)
    return stages


def _tied_uses(setting: Setting) -> list[list[TiedUse]]:
    names, plan = setting.definition.names, setting.plan
    groups = []
    for group in setting.definition.ties:
        uses = sorted((names.index(ref.layer), ref.parameter) for ref in group)
        groups.append([TiedUse(i, n, plan.stage_ranks[plan.stage_of_layer(i)]) for i, n in uses])
    return groups
