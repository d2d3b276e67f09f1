"""A LLaMA with real weights, SmolLM2 of 135 million parameters, that learns a chat task with adapters.

    make real-data
    python -m benchmarks.real_weights

Trains `examples/finetune-smollm2.toml` in a temporary folder on two ranks. Says whether the layers have the logits of
the model of transformers bit for bit, the perplexity of answers held out, and whether what is exported has the logits
of the run's layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.cli.exporting import export_command, export_folder_command
from orchestrator.spec.job_spec import load
from workers.build import build_module
from workers.models.registry import build_definition

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune-smollm2.toml"
QUESTION = [
    {"role": "user", "content": "Is the sentiment of this text negative, neutral or positive? I like it."}
]


def through(modules: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    """The logits of layers, one after the other."""
    found: Any = tokens
    with torch.no_grad():
        for module in modules:
            found = module(found)
    return found


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """The logits of a model of transformers."""
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    spec = load(EXAMPLE, [])
    path = Path(getattr(spec.model, "path", ""))
    if not (path / "config.json").exists():
        raise SystemExit(f"{path} is not there: run `make real-data`")
    words = AutoTokenizer.from_pretrained(path)
    tokens = words.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = spec.model.model_copy(update={"lora": None}).located(str)
    definition = build_definition(plain, None)
    layers = [build_module(definition, n, seed=0).eval() for n in range(len(definition.layers))]
    same = torch.equal(through(layers, tokens), logits_of(base, tokens))
    print(
        f"{date.today()}: {len(layers)} layers, logits {'equal' if same else 'unlike'} those of transformers"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "orchestrator", "train", str(EXAMPLE), "--set", f"job.output={run}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for line in (run / "events.jsonl").read_text().splitlines():
            told = json.loads(line)
            if told["event"] == "ValidationReport":
                print(
                    f"step {told['step']}: perplexity of answers held out {told['metrics']['perplexity']:.3f}"
                )
        export_folder_command(str(run), f"{folder}/adapter", format="huggingface", dtype=None)
        export_command(str(run), f"{folder}/run.safetensors", force=False)
        tensors = load_file(f"{folder}/run.safetensors")
        trained = []
        for layer in build_definition(spec.model.located(str), None).layers:
            module = layer.build().eval()
            inside = f"{layer.name}."
            module.load_state_dict(
                {k.removeprefix(inside): t for k, t in tensors.items() if k.startswith(inside)}
            )
            trained.append(module)
        adapted = PeftModel.from_pretrained(base, f"{folder}/adapter")
        same = torch.equal(through(trained, tokens), logits_of(adapted, tokens))
        print(f"the exported adapter in peft has {'the' if same else 'other'} logits of the run's layers")


if __name__ == "__main__":
    main()
