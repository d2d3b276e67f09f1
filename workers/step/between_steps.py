"""Work of the ranks between a commit and the next step: checkpoints, validation, and at the end a sample of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.checkpoint.coordination import Checkpointing
from workers.commit.unfinished import Unfinished
from workers.control.announcements import Announcements
from workers.data.dataset import Batch, OpenData
from workers.models.families.family import TextModel
from workers.models.loss import IGNORED
from workers.protocol.carried import Carried
from workers.protocol.goals import PastValidation, with_next
from workers.protocol.orders import Request
from workers.protocol.reports import Rescued, SampleReport, ValidationReport
from workers.protocol.target import better
from workers.reproducibility import rng
from workers.state.layer_state import LayerState, host_copy
from workers.step.engine import Engine
from workers.step.generation import GenerationSetup
from workers.step.minibatch import Minibatch
from workers.step.validation import validate
from workers.transport.channel import Channel

SAMPLING = 2
"""Purpose of the forward passes that sample text; see `Engine.evaluate`."""
PROMPT_TOKENS = 32
TEMPERATURE = 0.8


@dataclass(kw_only=True)
class BetweenSteps:
    """One rank's part, under one plan.

    Args:
        release: brings layers whose updates are held back to the newest step.
        last_step: returns the step at which the job is done.
    """

    setup: GenerationSetup
    channel: Channel
    minibatch: Minibatch
    announcements: Announcements
    checkpointing: Checkpointing
    release: Callable[[], None]
    last_step: Callable[[], int]
    validated: bool = field(default=False, init=False)
    """Whether the validation after the newest commit is done."""
    reached: str = field(default="", init=False)
    """The result of a validation that reached `job.stop_at`: the job is done."""
    plateau: str = field(default="", init=False)
    """The best value so far, in words, if `job.patience` is over: the job is done."""
    best: float | None = field(default=None, init=False)
    """The best value of `checkpoint.keep_best` so far."""

    @property
    def over(self) -> bool:
        """Whether validations say that the job is done."""
        return bool(self.reached or self.plateau)

    def attend(
        self,
        step: int,
        requests: frozenset[Request],
        carried: Carried,
        left: Unfinished | None = None,
    ) -> None:
        """Do what is due after the commit of `step`.

        Args:
            requests: those that the commit carried.
            carried: what the next step follows.
            left: what is known of that commit, if it was in an earlier generation.
        """
        config = self.setup.config
        if left is not None:
            self.best = left.best
            self._judge(step)
        last = Request.STOP in requests or step == self.last_step() or self.over
        every = config.checkpoint.every_steps
        due = last or (every and step % every == 0) or Request.CHECKPOINT in requests
        if left is not None:
            due = (due and left.whole < step) or left.begun > left.whole
        if Request.RESCUE in requests and not last:
            self._rescue(step, carried)
        elif due:
            self.release()
            self.checkpointing.start(step, self._copies, carried)
        every = config.job.validate_every
        if not self.validated and ((every and step % every == 0) or step == self.last_step()):
            self.release()
            rescued = Request.RESCUE in requests and not last
            best = self._validate(step, may_keep=not rescued)
            if (self.over or best) and not due and not rescued:
                self.checkpointing.start(step, self._copies, carried)

    def _rescue(self, step: int, carried: Carried) -> None:
        """Write a checkpoint of `step`, and go on once it is complete: one that waits for a later commit may come too
        late."""
        begun_s, rescues = time.time(), self.setup.rescues
        # Every rank has passed the commit then, and steps are reported before their checkpoint.
        self.channel.all_gather(b"")
        self.announcements.release(step)
        self.release()
        self.checkpointing.start(step, self._copies, carried)
        error = self.checkpointing.finish(self.channel, self.setup.place, step)
        ended_s = time.time()
        if self.setup.place == 0:
            lost_s = rescues.lost_s or begun_s
            ends_s, seconds = lost_s + rescues.patience_s, ended_s - begun_s
            self.setup.report(Rescued(step=step, lost_s=lost_s, ends_s=ends_s, seconds=seconds, error=error))
        rescues.wrote(begun_s, ended_s)

    def _copies(self, written: Callable[[LayerState], bool]) -> list[LayerState]:
        """Host copies of the layers that this rank writes, but of those that are `written` already."""
        setup = self.setup
        if setup.plan.shards > 1:
            return self.minibatch.shards.collect(moments=True)
        own = [state for _, state in setup.layers.values()] if setup.pipeline == 0 else []
        return [host_copy(state) for state in own if not written(state)]

    def _validate(self, step: int, *, may_keep: bool) -> bool:
        """Returns whether its metric is the best so far, if the best checkpoint is to be kept.

        Args:
            may_keep: whether the checkpoint of this step can still tell its metrics.
        """
        self.minibatch.weights.bring()
        found = validate(self.setup, self.minibatch.engine, self.channel)
        self.validated = True
        if found is None:
            return False
        self.announcements.release(step)
        report = ValidationReport(step=step, loss=found.loss, metrics=dict(found.metrics))
        self.announcements.add_shared(step, report)
        self.announcements.release(step)
        values = {"loss": found.loss, **found.metrics}
        config = self.setup.config
        self.checkpointing.validations = with_next(
            self.checkpointing.validations, PastValidation(step=step, values=values), config.goals.watched
        )
        self._judge(step)
        kept = config.checkpoint.keep_best
        if not may_keep or kept is None or kept not in values or not better(kept, values[kept], self.best):
            return False
        self.best = values[kept]
        return True

    def _judge(self, step: int) -> None:
        """Learn from the validation after `step`, if there was one, whether the job is done."""
        config, past = self.setup.config, self.checkpointing.validations
        self.reached = config.goals.reached(past, step)
        if step < self.last_step():
            self.plateau = config.goals.plateau(past, step)

    def sample(self, step: int) -> None:
        """Let the model of `step` continue a prompt, if it is one of language."""
        setup = self.setup
        if not setup.definition.language or setup.data.tokenizer is None:
            return
        assert isinstance(setup.config.model, TextModel), "only models of text are models of language"
        self.minibatch.weights.bring()
        setup.reading.wait()
        prompt, text = sample_text(
            self.minibatch.engine,
            self.channel,
            setup.data,
            context=setup.config.model.context,
            tokens=setup.config.job.sample_tokens,
            seed=setup.config.job.seed,
            purpose=SAMPLING,
        )
        if setup.place == 0:
            setup.report(SampleReport(step=step, prompt=prompt, text=text))

    def whole_layers(self) -> list[LayerState]:
        """The layers that this rank tells the digests of, with weights and buffers at least."""
        if self.setup.plan.shards > 1:
            return self.minibatch.shards.collect(moments=False)
        return [state for _, (_, state) in sorted(self.setup.layers.items())]


def sample_text(
    engine: Engine, channel: Channel, data: OpenData, *, context: int, tokens: int, seed: int, purpose: int
) -> tuple[str, str]:
    """Continue the beginning of the first held-out sample (else the first training sample) by `tokens`
    tokens.

    All ranks call this together. Each new token is one forward pass of one padded row, int64[1, context]; the
    padding after the last token has no effect, because attention is causal. The draws are keyed by `seed`.

    Returns:
        The prompt and its continuation, the same on every rank.
    """
    tokenizer = data.tokenizer
    assert tokenizer is not None
    dataset = data.dataset
    held_out = dataset.validation([0]) if dataset.validation_samples else dataset.train([0])
    prompt = held_out.inputs[0][0][: min(PROMPT_TOKENS, context, _written(held_out))].tolist()
    text = list(prompt)
    generator = rng.generator(rng.key(seed, "sample"))
    for _ in range(tokens):
        row = torch.zeros(1, context, dtype=torch.int64)
        window = text[-context:]
        row[0, : len(window)] = torch.tensor(window)
        results = engine.evaluate(lambda _, row=row: Batch((row,), ()), 1, purpose=purpose)
        record = b""
        if 0 in results:
            record = str(_draw(results[0][0][0, len(window) - 1], generator)).encode()
        told = [r for r in channel.all_gather(record) if r]
        text.append(int(told[0]))
    return tokenizer.decode(prompt), tokenizer.decode(text[len(prompt) :])


def _written(batch: Batch) -> int:
    """Tokens of the first sample up to the last that the loss asks for, or of its first document where documents lie
    beside tokens; what follows may be padding."""
    tokens, *beside = (each[0] for each in batch.inputs)
    if beside and beside[0].shape == tokens.shape:
        return int((beside[0] == beside[0][0]).sum())
    targets = batch.targets[0][0] if batch.targets else None
    if targets is None or targets.shape != tokens.shape:
        return len(tokens)
    asked = (targets != IGNORED).nonzero()
    return int(asked[-1]) + 1 if len(asked) else len(tokens)


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    probabilities = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
