"""Jobs small enough to train in a second, for tests that need a real job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.spec.job_spec import Spec

STEPS = 6

TOML = """
[job]
name = "{name}"
steps = 6
sample_tokens = 8

[model]
family = "gpt"
layers = 4
width = 16
heads = 2
context = 16

[data]
source = "text"
path = "{text}"

[optimizer]
warmup_steps = 2

[pipeline]
ranks = 4
microbatches = 4
microbatch_size = 2

[cluster]
wait_s = 240
"""


def write_text(folder: Path) -> Path:
    """A file of text with something to learn."""
    folder.mkdir(exist_ok=True)
    path = folder / "text.txt"
    path.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(300)))
    return path


def write_spec(folder: Path, name: str) -> Path:
    """The job as a TOML file; its output goes beside it."""
    path = folder / f"{name}.toml"
    path.write_text(TOML.format(name=name, text=write_text(folder)))
    return path


def tiny(folder: Path, name: str, **sections: dict[str, Any]) -> Spec:
    """The same job in Python, joining the cluster that this process is connected to."""
    given: dict[str, dict[str, Any]] = {
        "job": {"name": name, "steps": STEPS, "sample_tokens": 8, "output": str(folder / name)},
        "model": {"family": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16},
        "data": {"source": "text", "path": str(write_text(folder))},
        "optimizer": {"warmup_steps": 2},
        "pipeline": {"ranks": 4, "microbatches": 4, "microbatch_size": 2},
        "freeze": {},
        "checkpoint": {},
        "elastic": {},
        "adapt": {},
        "cluster": {"address": "auto", "device": "cpu", "wait_s": 240},
        "logging": {},
    }
    for section, keys in sections.items():
        given[section].update(keys)
    return Spec.model_validate(given)
