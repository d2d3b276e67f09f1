"""A mistake in a user's layer, loss or first samples is named, with the user's line, before Ray starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import freshet_here

from orchestrator.cli.exit_codes import USER_ERROR
from orchestrator.client.shadowing import OWN
from orchestrator.prepare import first_step
from orchestrator.prepare.first_step import try_first_step
from orchestrator.spec.job_spec import load
from workers.data.registry import open_dataset
from workers.models.outline import outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError

MODULE = """
from functools import partial

import torch
from torch import nn

passes, read = [], []


class Counts(nn.Linear):
    def forward(self, x):
        passes.append(tuple(x.shape))
        return super().forward(x)


class Raises(nn.Linear):
    def forward(self, x):
        raise ValueError("never works")


class Lacks(nn.Linear):
    def forward(self, x):
        raise OSError("no such card")


def model(last="Linear", inner=8):
    kinds = {"Linear": nn.Linear, "Raises": Raises, "Lacks": Lacks}
    return [partial(Counts, 16, 8), partial(kinds[last], inner, 4)], nn.functional.cross_entropy


def unmeant(last="Linear"):
    return model()[0], lambda outputs, targets: outputs


class Samples:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 40

    def __getitem__(self, index):
        read.append(index)
        if index in self.bad:
            raise KeyError(f"label of {index}")
        return torch.ones(16), index % 4


def data(bad=()):
    return Samples(bad)
"""
COUNT = 0


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, under a name that no other test has imported."""
    global COUNT
    COUNT += 1
    file = tmp_path / f"users_first_step_{COUNT}.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def written(users: Path) -> Path:
    """A spec with the user's model and data."""
    file = users.with_name("job.toml")
    file.write_text(f"""
[job]
name = "own"
steps = 4
validate_every = 2
output = "{users.with_name("run")}"
[model]
factory = "{users.stem}:model"
[data]
source = "{users.stem}:data"
[pipeline]
ranks = 2
microbatches = 3
microbatch_size = 2
""")
    return file


def tried(users: Path, *overrides: str) -> Any:
    """The user's module after a try."""
    spec = load(written(users), overrides)
    data = open_dataset(spec.data, spec.model, spec.job.folder)
    definition = build_definition(spec.model, data.vocabulary)
    module = sys.modules[users.stem]
    module.passes.clear()
    module.read.clear()
    try_first_step(spec, definition, [layer.parameters for layer in outline(definition)], data.dataset)
    return module


def line_of(users: Path, text: str) -> int:
    (number,) = (n for n, line in enumerate(users.read_text().splitlines(), 1) if text in line)
    return number


def test_the_first_step_is_read_and_computed_once(users: Path) -> None:
    module = tried(users)
    assert module.passes == [(2, 16)]
    trained, held_out = [i for i in module.read if i < 38], [i for i in module.read if i >= 38]
    assert len(trained) == len(set(trained)) == 3 * 2
    assert held_out == [38, 39]


def test_a_layer_that_raises_is_named_with_its_line(users: Path) -> None:
    where = rf"{users}:{line_of(users, 'never works')} in forward"
    with pytest.raises(
        JobError, match=f"the forward pass of layer layer1 raised ValueError: never works, at {where}"
    ):
        tried(users, "model.arguments.last=Raises")


def test_shapes_that_do_not_fit_are_named(users: Path) -> None:
    with pytest.raises(
        JobError, match=r"the forward pass of layer layer1 raised RuntimeError: .*2x8 and 9x4"
    ):
        tried(users, "model.arguments.inner=9")


def test_a_loss_that_is_no_scalar_is_named(users: Path) -> None:
    with pytest.raises(JobError, match="the loss must be a scalar tensor"):
        tried(users, f"model.factory={users.stem}:unmeant")


def test_a_sample_that_raises_is_named_in_any_microbatch_of_the_first_step(users: Path) -> None:
    last = [i for i in tried(users).read if i < 38][-1]
    where = rf"{users}:{line_of(users, 'label of')} in __getitem__"
    with pytest.raises(
        JobError, match=rf"reading samples \d+, {last} for .* raised KeyError: 'label of {last}', at {where}"
    ):
        tried(users, f"data.arguments.bad=[{last}]")


def test_a_held_out_sample_that_raises_is_named(users: Path) -> None:
    with pytest.raises(JobError, match=r"reading validation samples 0, 1 for .*'label of 39'"):
        tried(users, "data.arguments.bad=[39]")
    tried(users, "data.arguments.bad=[39]", "job.validate_every=0")


def test_what_only_a_rank_may_have_is_left_to_the_ranks(users: Path) -> None:
    assert tried(users, "model.arguments.last=Lacks").passes == [(2, 16)]


@pytest.mark.parametrize("limit", ["MOST_PARAMETERS", "MOST_INPUT_BYTES", "COMPUTE_S"])
def test_a_large_model_is_left_to_the_ranks(users: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, limit, -1)
    assert tried(users).passes == []


def test_a_model_for_gpus_is_left_to_the_ranks(users: Path) -> None:
    assert tried(users, "cluster.device=cuda").passes == []
    assert tried(users, "cluster.address=10.0.0.1:6379").passes == []
    assert tried(users, "cluster.address=10.0.0.1:6379", "cluster.device=cpu").passes == [(2, 16)]


def test_slow_reading_ends_after_the_first_microbatch(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "READ_S", -1)
    assert len([i for i in tried(users).read if i < 38]) == 2


def test_freshet_train_says_it_in_one_line_and_imports_no_ray(users: Path) -> None:
    """In a process of its own: other tests have imported Ray here."""
    spec = written(users)
    code = """
import sys
from orchestrator.cli.main import main
try:
    main()
finally:
    assert "torch" in sys.modules
    assert "ray" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, "train", str(spec), "--set", "model.arguments.last=Raises"],
        env={"PATH": "", "HOME": str(users.parent), "PYTHONPATH": f"{OWN}:{users.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == USER_ERROR
    assert ran.stderr.startswith(
        "freshet: the forward pass of layer layer1 raised ValueError: never works, at "
    )
    assert ran.stderr.count("\n") == 1
    assert not users.with_name("run").exists(), "nothing has been claimed"


def test_freshet_plan_says_it_too(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freshet_here("plan", str(written(users)), "--set", "data.arguments.bad=[39]") == USER_ERROR
    assert "reading validation samples 0, 1 for the first step raised KeyError" in capsys.readouterr().err
