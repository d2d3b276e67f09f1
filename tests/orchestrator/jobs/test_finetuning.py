"""The example that trains a LLaMA of transformers on conversations, whole and with adapters: a rank is killed, and
transformers and peft load what is exported, with the logits of the job's own layers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from process_hosts import ElasticJob, assert_gone
from ray_jobs import resolved
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.exporting import export_command, export_folder_command
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import load
from workers.launch.ranks import LaunchedJob
from workers.models.registry import build_definition
from workers.protocol.reports import StandbyReport, StepReport, ValidationReport

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "finetune-llama.toml"
STEPS = 10
LORA = 'model.lora={ rank = 4, alpha = 8, targets = ["q_proj", "v_proj"] }'

pytestmark = pytest.mark.xdist_group("test_finetuning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and the conversations."""
    folder = tmp_path_factory.mktemp("made")
    runpy.run_path(str(ROOT / "examples" / "small_llama.py"))["main"](folder)
    return folder


def example(made: Path, output: Path, *overrides: str) -> Settled:
    """The example, in a few steps."""
    given = [
        f"job.output={output}",
        f"job.steps={STEPS}",
        "job.validate_every=5",
        f"model.path={made / 'small-llama'}",
        f"data.path={made / 'sums' / 'train.jsonl'}",
        f"data.validation_path={made / 'sums' / 'held-out.jsonl'}",
        "checkpoint.every_steps=5",
        "elastic.grow=false",
    ]
    return resolved(load(EXAMPLE, [*given, *overrides]))


def killed(settled: Settled, base_bytes: int) -> str:
    """The state in which the job ends that loses a rank at step 4.

    With adapters nobody sends what they lie beside.

    Args:
        base_bytes: of the model without adapters.
    """
    done: list[int] = []
    lost = settled.plan.world_size // 2

    def kill(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == 4 and not done:
            done.append(event.step)
            running.signal(lost)

    ran = ElasticJob(settled, kill).run()
    assert isinstance(ran.state, JobFinished), ran.state
    assert [failed.rank for failed in ran.of(events.RankFailed)] == [lost]
    assert ran.steps == [*range(1, STEPS + 1)]
    assert_gone(ran.pids)
    sent = sum(report.bytes for report in ran.of(StandbyReport))
    assert (0 < sent < base_bytes / 2) is (settled.config.model.lora is not None)
    assert ran.state_sha256 is not None
    return ran.state_sha256


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("pipeline.ranks=2",), id="whole-replicas"),
        pytest.param(
            (LORA, "pipeline.ranks=3", "pipeline.replicas=1", "pipeline.shard=none"), id="lora-stages"
        ),
        pytest.param((), id="whole", marks=pytest.mark.soak),
        pytest.param((LORA,), id="lora", marks=pytest.mark.soak),
    ],
)
def test_a_killed_job_has_the_usual_bits_and_what_it_exports_the_logits_of_its_layers(
    overrides: tuple[str, ...], made: Path, tmp_path: Path
) -> None:
    """With the two replicas of two stages that the example has; and with two replicas, or three stages."""
    quiet = example(made, tmp_path / "quiet", *overrides)
    expected = run_threads(LaunchedJob(quiet.config, quiet.plan, quiet.schedule))
    settled = example(made, tmp_path / "run", *overrides)
    model = made / "small-llama" / "model.safetensors"
    assert killed(settled, model.stat().st_size) == expected.state_sha256
    losses = [each.loss for each in expected.reports if isinstance(each, StepReport)]
    assert losses[-1] < losses[0]
    told = [each for each in expected.reports if isinstance(each, ValidationReport)]
    assert [each.metrics.keys() for each in told] == [{"perplexity"}] * 2

    run = str(tmp_path / "run")
    export_command(run, str(tmp_path / "run.safetensors"), force=False)
    export_folder_command(run, str(tmp_path / "out"), format="huggingface", dtype=None)
    words = AutoTokenizer.from_pretrained(made / "small-llama")
    tokens = words(["what is 3 + 4 ?", "7 + 8 is 15 ."], return_tensors="pt").input_ids
    lora = settled.config.model.lora is not None
    base = made / "small-llama" if lora else tmp_path / "out"
    loaded: Any = AutoModelForCausalLM.from_pretrained(base)
    if lora:
        # The job has held in 16 bits what it does not train.
        for parameter in loaded.parameters():
            parameter.data = parameter.data.bfloat16().float()
        loaded = PeftModel.from_pretrained(loaded, tmp_path / "out")
    else:
        assert (tmp_path / "out" / "chat_template.jinja").exists()
    with torch.no_grad():
        found = loaded.eval()(input_ids=tokens, use_cache=False).logits
    assert torch.equal(found, logits(settled, tmp_path / "run.safetensors", tokens))


def logits(settled: Settled, weights: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Those of the job's own layers with the weights of an export, on one process."""
    tensors = load_file(weights)
    definition = build_definition(settled.config.model, None)
    found: Any = tokens
    with torch.no_grad():
        for layer in definition.layers:
            module = layer.build().eval()
            own = {
                key.removeprefix(f"{layer.name}."): t
                for key, t in tensors.items()
                if key.startswith(f"{layer.name}.")
            }
            module.load_state_dict(own)
            found = module(found)
    return found
