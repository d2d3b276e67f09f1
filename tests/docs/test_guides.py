"""What the README and the guides tell users to type: run where that is cheap, else checked against the real
code.

The real command line parses every `freshet` line, and the real spec every TOML block. The first job trains in
`test_cli_train.py`, and the examples with a user's own model and data here.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import freshet_here
from guide_pages import BLOCKS, ROOT, SMALL, TYPED, Block, write_files
from resolving import resolve_spec

from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.main import app
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.spec.job_spec import Spec, load, parse_override
from planner.partition.rank_sums import MOST_CUTS
from workers.launch.ranks import LaunchedJob, LaunchedRun


@cache
def commands() -> dict[str, Any]:
    whole: Any = typer.main.get_command(app)
    return whole.commands


@pytest.mark.parametrize("line", TYPED)
def test_the_command_line_takes_what_a_page_types(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = commands()[name]
    if "--help" in arguments:
        return
    context = command.make_context(name, list(arguments))
    for override in context.params.get("overrides") or ():
        key, value = parse_override(override)
        spec: dict[str, object] = {"job": {"name": "any"}}
        table = spec.setdefault(key[0], {})
        assert isinstance(table, dict)
        table[key[1]] = value
        Spec.model_validate(spec)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_the_spec_takes_every_toml_block(block: Block) -> None:
    tables = tomllib.loads(block.text)
    assert block.file is None or "job" in tables
    Spec.model_validate({"job": {"name": "any"}, **tables})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, str(block), "exec")


def test_make_targets_that_the_readme_names_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"\bmake (run|test|check|bench|format|clean)\b", readme))
    assert {"run", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert len(readme.splitlines()) <= 120


@pytest.mark.parametrize("page", ["guides/planning.md", "spec.md"])
def test_the_limit_of_the_bottleneck_search_is_named(page: str) -> None:
    assert f"more than {MOST_CUTS:,} cuts" in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize(
    ("factory", "source"),
    [
        ("my_net:build", "my_data:open_blobs"),
        ("my_net:build", "my_tensors:open_tensors"),
        ("my_language_model:build", "text"),
    ],
)
def test_models_and_data_of_the_guides_train(
    factory: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = {"path": "README.md"} if source == "text" else {}
    given = {
        "job": {"name": "own", "steps": 2, "output": "runs/own", "sample_tokens": 0},
        "model": {"factory": factory, "context": 16},
        "data": {"source": source, **text},
        "pipeline": {"ranks": 2, "microbatches": 2, "microbatch_size": 2},
        "cluster": {"device": "cpu"},
    }
    spec = absolute(Spec.model_validate(given))
    found = outline_model(spec)
    resolved = resolve_spec(spec, found, {}, epoch=1)
    done = run_threads(LaunchedJob(resolved.config, resolved.plan, resolved.schedule))
    assert all(outcome.layer_digests for outcome in done.outcomes)


def test_the_second_example_goes_on_from_the_weights_of_the_first(tmp_path: Path) -> None:
    """Small versions of the two jobs in the guide on freezing, with the guide's export between them."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.md").write_text((ROOT / "README.md").read_text())

    def run(example: str, *overrides: str) -> tuple[Spec, LaunchedRun]:
        small = [*SMALL, "pipeline.partition=parameter", "job.validate_every=0", "checkpoint.every_steps=0"]
        given = load(
            ROOT / "examples" / f"{example}.toml", [*small, f"job.output={tmp_path / example}", *overrides]
        )
        spec = absolute(given)
        resolved = resolve_spec(spec, outline_model(spec), {}, epoch=1)
        return resolved.spec, run_threads(
            LaunchedJob(resolved.config, resolved.plan, resolved.schedule, stop_at=2)
        )

    run("gpt", "job.steps=30")
    assert freshet_here("export", str(tmp_path / "gpt"), "--out", str(tmp_path / "gpt.safetensors")) in (
        0,
        None,
    )
    given = [
        f"model.weights={tmp_path / 'gpt.safetensors'}",
        f"data.path={tmp_path / 'pages'}",
        "job.steps=30",
    ]
    spec, finetuned = run("finetune", *given)
    assert spec.freeze.method == "timelyfreeze"
    assert spec.model.weights_sha256 is not None
    _, again = run("finetune", *given, "pipeline.ranks=2", "job.output=" + str(tmp_path / "again"))
    assert again.state_sha256 == finetuned.state_sha256


def test_the_spec_of_the_first_job_is_whole(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert load(tmp_path / "my.toml", SMALL).job.name == "mine"
    assert load(tmp_path / "own.toml").model.factory == "my_net:build"
