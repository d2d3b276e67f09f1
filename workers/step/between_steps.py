"""Work of the ranks between a commit and the next step: checkpoints, validation, and at the end a sample of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.checkpoint.coordination import Checkpointing
from workers.commit.unfinished import Unfinished
from workers.control.announcements import Announcements
from workers.loss_scale import LossScale
from workers.protocol import Request, Rescued, SampleReport, ValidationReport
from workers.state.layer_state import LayerState, host_copy
from workers.step.generation import GenerationSetup
from workers.step.minibatch import Minibatch
from workers.step.sample_text import sample_text
from workers.step.validation import SAMPLING, validate
from workers.transport.channel import Channel


@dataclass(kw_only=True)
class BetweenSteps:
    """One rank's part, under one plan.

    Args:
        release: brings layers whose updates are held back to the newest step.
    """

    setup: GenerationSetup
    channel: Channel
    minibatch: Minibatch
    announcements: Announcements
    checkpointing: Checkpointing
    release: Callable[[], None]
    validated: bool = field(default=False, init=False)
    """Whether the validation after the newest commit is done."""

    def attend(
        self,
        step: int,
        requests: frozenset[Request],
        loss_scale: LossScale | None,
        left: Unfinished | None = None,
    ) -> None:
        """Do what is due after the commit of `step`.

        Args:
            requests: those that the commit carried.
            loss_scale: of the next step.
            left: what is known of that commit, if it was in an earlier generation.
        """
        config = self.setup.config
        last = Request.STOP in requests or step == config.steps
        every = config.checkpoint.every_steps
        due = last or (every and step % every == 0) or Request.CHECKPOINT in requests
        if left is not None:
            due = (due and left.whole < step) or left.begun > left.whole
        if Request.RESCUE in requests and not last:
            self._rescue(step, loss_scale)
        elif due:
            self.release()
            self.checkpointing.start(step, self._copies, loss_scale)
        every = config.validate_every
        if not self.validated and ((every and step % every == 0) or step == config.steps):
            self.release()
            self._validate(step)

    def _rescue(self, step: int, loss_scale: LossScale | None) -> None:
        """Write a checkpoint of `step`, and go on once it is complete: one that waits for a later commit may come too
        late."""
        begun_s, rescues = time.time(), self.setup.rescues
        # Every rank has passed the commit then, and steps are reported before their checkpoint.
        self.channel.all_gather(b"")
        self.announcements.settle(step)
        self.release()
        self.checkpointing.start(step, self._copies, loss_scale)
        error = self.checkpointing.finish(self.channel, self.setup.place, step)
        ended_s = time.time()
        if self.setup.place == 0:
            lost_s = rescues.lost_s or begun_s
            ends_s, seconds = lost_s + rescues.patience_s, ended_s - begun_s
            self.setup.report(Rescued(step=step, lost_s=lost_s, ends_s=ends_s, seconds=seconds, error=error))
        rescues.wrote(begun_s, ended_s)

    def _copies(self) -> list[LayerState]:
        """Host copies of the layers that this rank writes."""
        setup = self.setup
        if setup.plan.shards > 1:
            return self.minibatch.shards.collect(moments=True)
        return [host_copy(state) for _, state in setup.layers.values()] if setup.pipeline == 0 else []

    def _validate(self, step: int) -> None:
        self.minibatch.weights.bring()
        loss = validate(self.setup, self.minibatch.engine, self.channel)
        self.validated = True
        if loss is not None:
            self.announcements.settle(step)
            self.announcements.add_shared(step, ValidationReport(step=step, loss=loss))
            self.announcements.settle(step)

    def sample(self, step: int) -> None:
        """Let the model of `step` continue a prompt, if it is one of language."""
        setup = self.setup
        if not setup.definition.language or setup.data.tokenizer is None:
            return
        self.minibatch.weights.bring()
        setup.reading.wait()
        prompt, text = sample_text(
            self.minibatch.engine,
            self.channel,
            setup.data,
            context=setup.config.model.context,
            tokens=setup.config.sample_tokens,
            seed=setup.config.seed,
            purpose=SAMPLING,
        )
        if setup.place == 0:
            setup.report(SampleReport(step=step, prompt=prompt, text=text))

    def whole_layers(self) -> list[LayerState]:
        """The layers that this rank tells the digests of, with weights and buffers at least."""
        if self.setup.plan.shards > 1:
            return self.minibatch.shards.collect(moments=False)
        return [state for _, (_, state) in sorted(self.setup.layers.items())]
