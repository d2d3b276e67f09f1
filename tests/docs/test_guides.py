"""What the README and the guides tell users to type: run where that is cheap, else checked against the real
code.

The real command line parses every `freshet` line, and the real spec every TOML block. The first job trains,
and so do the examples with a user's own model and data.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import freshet_here
from resolving import resolve_spec

from benchmarks.parts.rank_threads import run_threads
from orchestrator.cli.main import app
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.spec.job_spec import Spec, load, parse_override
from planner.partition.rank_sums import MOST_CUTS
from workers.launch.ranks import LaunchedJob, LaunchedRun

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
SMALL = ("job.steps=2", "job.sample_tokens=0", "model.width=16", "model.context=16", "cluster.wait_s=240")
"""Makes the first job take about a second; `cluster.wait_s` allows for a busy machine."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the first line names, as in `# my.toml`."""
        named = re.match(r"# ([\w-]+\.(?:toml|py))\n", self.text)
        return named and named.group(1)

    def __str__(self) -> str:
        return f"{self.page.stem}-{self.file or self.language}"


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
LINES = [line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()]
TYPED = sorted({line.split("#")[0].strip() for line in LINES if line.startswith("freshet ")})


def write_files(folder: Path) -> None:
    """Write the files that the pages show, and the README that the first job reads."""
    for block in BLOCKS:
        if block.file:
            (folder / block.file).write_text(block.text)
    (folder / "README.md").write_text((ROOT / "README.md").read_text())


@pytest.mark.parametrize("line", TYPED)
def test_the_command_line_takes_what_a_page_types(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    commands: Any = typer.main.get_command(app)
    command = commands.commands[name]
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


@pytest.mark.xdist_group("test_guides")
def test_the_first_job_runs_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `freshet train my.toml` as a separate process, then the guide's commands on its folder."""
    write_files(tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "train", "my.toml", *(f"--set={key}" for key in SMALL)],
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 steps" in done.stdout
    run = tmp_path / "runs" / "mine"
    assert {"report.html", "events.jsonl", "job.json", "checkpoints"} <= {file.name for file in run.iterdir()}

    monkeypatch.chdir(tmp_path)
    typed = [
        line for line in TYPED if re.match(r"freshet (verify|timeline|report|logs|export) runs/mine", line)
    ]
    assert len(typed) == 7
    for line in (*typed, *(line for line in TYPED if line.startswith("freshet schedule"))):
        assert freshet_here(*shlex.split(line)[1:]) in (0, None), line
    assert "proved" in capsys.readouterr().out
    assert {"step.svg", "mine.safetensors", "1f1b.csv"} <= {file.name for file in tmp_path.iterdir()}


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
