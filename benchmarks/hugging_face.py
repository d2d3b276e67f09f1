"""One rank beside a plain loop over the same model of transformers: what the engine and its layers cost.

    python -m benchmarks.hugging_face [--models llama,gpt2,...] [--rounds N] [--steps N]

Four blocks each (ConvNeXt-V2: two stages of two), 8 microbatches of 4, AdamW without clipping, float32, one thread,
each in a process of its own, in turn. The plain loop calls the whole model, without a cache for generation, and its
loss, `loss.backward()`, `optimizer.step()`. A round's figure is the median of its steps after the first two; the ratio
is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.parts.forked_answers import forked_answers
from benchmarks.parts.targets import at_least
from benchmarks.parts.two_rank_job import WARM_UP, make_job
from planner.schedule.registry import build
from workers.config import DataConfig, ModelConfig
from workers.data.registry import open_dataset
from workers.data.sampling import train_indices
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.huggingface.definition import model_of
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport

_DECODER = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_IMAGES = {"num_channels": 1, "num_labels": 10, "image_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 2, "intermediate_size": 688}, 0.97),
    "bert": ("BertForSequenceClassification", {**_DECODER, "intermediate_size": 1024, "num_labels": 3}, 0.97),
    "vit": (
        "ViTForImageClassification",
        {
            **_IMAGES,
            "patch_size": 8,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        0.97,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 4096,
            "n_embd": 256,
            "n_layer": 4,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        0.95,
    ),
    "convnext_v2": (
        "ConvNextV2ForImageClassification",
        {**_IMAGES, "hidden_sizes": [64, 128], "depths": [2, 2], "num_stages": 2},
        0.95,
    ),
}
"""Name -> class of transformers, fields of its config.json, least share of the plain loop's throughput."""
LENGTH, MICROBATCHES = 128, 8


def hugging_face_job(name: str, steps: int, output: Path) -> LaunchedJob:
    """The job of one rank that trains the model `name`, with drawn weights."""
    architecture, fields, _ = MODELS[name]
    config = {**fields, **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)}
    config |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    model = ModelConfig(
        family="huggingface", architecture=architecture, config=config, pretrained=False, context=LENGTH
    )
    task = model_of(config, architecture).task
    images = "image_size" in fields
    arguments = {
        "task": task,
        "size": fields["image_size"] if images else LENGTH,
        "vocabulary": fields.get("vocab_size", 0),
        "classes": fields.get("num_labels", 10),
    }
    data = DataConfig(source="benchmarks.parts.hugging_face_batches:RandomBatches", arguments=arguments)
    job = make_job("1f1b", steps, output, model=model, data=data)
    layers = len(build_definition(job.config.model, None).layers)
    plan = replace(job.plan, layers=((0, layers),), stage_ranks=(0,))
    return replace(job, plan=plan, schedule=build("1f1b", 1, MICROBATCHES, 1))


def _loop(job: LaunchedJob, pipe: Connection) -> None:
    torch.set_num_threads(1)
    config: Any = job.config
    model = model_of(config.model.config, config.model.architecture)
    dataset = open_dataset(config.data, config.model, config.job.folder).dataset
    loss_of = build_definition(config.model, None).loss
    torch.manual_seed(config.job.seed)
    whole = getattr(model.module, model.name)(model.config).train()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=config.optimizer.lr)
    text = "vocab_size" in config.model.config
    taken: list[float] = []
    size = config.pipeline.microbatch_size
    for step in range(config.job.steps):
        begun = perf_counter()
        for microbatch in range(MICROBATCHES):
            samples = train_indices(
                config.job.seed, step, microbatch, MICROBATCHES, size, dataset.train_samples
            )
            batch = dataset.train(samples)
            names = ("input_ids", "attention_mask") if text else ("pixel_values",)
            given = dict(zip(names, batch.inputs, strict=False))
            if model.task == "language":
                given["use_cache"] = False
            (loss_of(whole(**given).logits, *batch.targets) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(perf_counter() - begun)
    pipe.send(taken[WARM_UP:])


def plain(job: LaunchedJob) -> list[float]:
    """Seconds of each step of the plain loop."""
    (taken,) = forked_answers(_loop, [(job,)])
    return taken


def ours(job: LaunchedJob) -> list[float]:
    """Seconds of each step of the rank."""
    return [r.step_s for r in run_processes(job).reports if isinstance(r, StepReport)][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}")
    for name in options.models.split(","):
        ratios, own_s, their_s = list[float](), list[float](), list[float]()
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                job = hugging_face_job(name, options.steps, Path(folder))
                # Each comes first in every other round.
                order = (plain, ours) if number % 2 else (ours, plain)
                found = {run: median(run(job)) for run in order}
            own_s.append(found[ours])
            their_s.append(found[plain])
            ratios.append(found[plain] / found[ours])
        text = (
            f"{name}: ours {1e3 * median(own_s):.0f} ms, plain {1e3 * median(their_s):.0f} ms a step; throughput over"
            f" the plain loop's {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
        print(at_least(text, median(ratios), MODELS[name][2]), flush=True)


if __name__ == "__main__":
    main()
