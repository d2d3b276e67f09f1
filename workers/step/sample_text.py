"""Samples text from the trained model, through the pipeline that trained it."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.data.dataset import Batch, OpenData
from workers.reproducibility import rng
from workers.step.engine import Engine
from workers.transport.channel import Channel

PROMPT_TOKENS = 32
TEMPERATURE = 0.8


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
    prompt = held_out.inputs[0][0][: min(PROMPT_TOKENS, context)].tolist()
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


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    probabilities = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
