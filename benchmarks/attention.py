"""What deferring the gradients of `nn.MultiheadAttention` gains, on a model of torch's own encoder layers.

    python -m benchmarks.attention [--schedules LIST] [--rounds N] [--steps N]

The job is that of `benchmarks.pipelining` with microbatches of 1 and `nn.TransformerEncoderLayer` blocks.
Without deferral, the attention's matrices need a second walk of each layer's graph, like every matrix that no
deferral covers. Runs with and without deferral alternate. Both ranks are threads of one process, and the
benchmark compares the processor time of that process.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn

from benchmarks.parts.rank_threads import run_threads
from benchmarks.parts.two_rank_job import LAYERS, make_job
from workers.config import ModelConfig
from workers.layers.deferred import cover
from workers.layers.deferred.attention import attention_is_covered
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.loss import mean_cross_entropy
from workers.models.modules.gpt import GptEmbedding, GptHead

WIDTH, HEADS, CONTEXT, VOCABULARY = 256, 4, 128, 256
MODEL = ModelConfig(factory="benchmarks.attention:encoder", context=CONTEXT)


class Encoder(nn.Module):
    """One causal encoder layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, T, D] -> float[B, T, D]."""
        return self.layer(x, src_mask=self.mask, is_causal=True)


def encoder() -> ModelDefinition:
    """The factory of the job's model."""
    embed = partial(GptEmbedding, vocabulary=VOCABULARY, width=WIDTH, context=CONTEXT, dropout=0.0)
    head = partial(GptHead, vocabulary=VOCABULARY, width=WIDTH)
    blocks = (LayerBuilder(f"block{index}", Encoder) for index in range(LAYERS))
    return ModelDefinition(
        layers=(LayerBuilder("embed", embed), *blocks, LayerBuilder("head", head)), loss=mean_cross_entropy
    )


def never(module: nn.MultiheadAttention) -> bool:
    return False


def cpu_s(schedule: str, steps: int, folder: Path, *, deferred: bool) -> float:
    """Processor time of all steps of a job but the first."""
    cover.attention_is_covered = attention_is_covered if deferred else never
    spent_s = []
    for count in (1, 1 + steps):
        begun_s = process_time()
        run_threads(make_job(schedule, count, folder, model=MODEL, microbatch_size=1))
        spent_s.append(process_time() - begun_s)
    return spent_s[1] - spent_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", default="1f1b,zb-h1,zbv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(f"torch {torch.__version__}; two ranks, {options.rounds} rounds of {options.steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.schedules.split(","):
            ratios: list[float] = []
            for _ in range(options.rounds):
                with_it = cpu_s(name, options.steps, Path(folder), deferred=True)
                without = cpu_s(name, options.steps, Path(folder), deferred=False)
                ratios.append(without / with_it)
                print(
                    f"{name}: deferred {with_it / options.steps:.3f} s a step, walked again"
                    f" {without / options.steps:.3f} s, {ratios[-1]:.3f} times",
                    flush=True,
                )
            print(f"{name}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main()
