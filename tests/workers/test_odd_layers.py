"""Any module trains to the bits of a plain loop, whatever it does to stock layers, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import odd_states  # noqa: F401  # its layers are listed too
import pytest
from jobs import job, small_config
from odd_models import PAIRS, REFUSED, RIGHT
from reference import train_plainly

from benchmarks.parts.rank_threads import run_threads
from workers.config import ModelConfig, WorkerConfig
from workers.protocol.errors import JobError
from workers.protocol.reports import LayersChecked, StepReport, WarningReport


def config_of(output: Path, factory: str, **arguments: Any) -> WorkerConfig:
    return small_config(
        output, model=ModelConfig(factory=f"odd_models:{factory}", arguments=arguments), steps=3
    )


WAYS = {"keeps": ("1f1b", False), "recomputes": ("zb-h1", True)}


def equals_the_plain_loop(
    config: WorkerConfig,
    output: Path,
    names: Sequence[str] = ("l0", "l1", "l2", "l3"),
    ways: Sequence[str] = tuple(WAYS),
) -> None:
    expected, expected_losses = train_plainly(config, output)
    for family, recompute in map(WAYS.__getitem__, ways):
        run = run_threads(job(config, ranks=2, schedule=family, layers=4, recompute=recompute))
        losses = [report.loss for report in run.reports if isinstance(report, StepReport)]
        assert losses == expected_losses, (family, recompute)
        assert run.state_sha256 == expected, (family, recompute)
        checked = [
            name for report in run.reports if isinstance(report, LayersChecked) for name in report.layers
        ]
        assert sorted(checked) == [*names]


def one_way_each(names: Iterable[str]) -> list[Any]:
    """(name, way), of which `make test` has each name in one way and `make bench` in the other."""
    return [
        pytest.param(name, way, marks=pytest.mark.soak if (number + turn) % 2 else ())
        for number, name in enumerate(names)
        for turn, way in enumerate(WAYS)
    ]


@pytest.mark.parametrize(("odd", "way"), one_way_each(RIGHT))
def test_an_odd_layer_trains_as_in_a_plain_loop(tmp_path: Path, odd: str, way: str) -> None:
    equals_the_plain_loop(config_of(tmp_path, "model", odd=odd), tmp_path, ways=[way])


@pytest.mark.parametrize(("name", "way"), one_way_each(PAIRS))
def test_what_goes_between_odd_layers_keeps_its_gradient_or_its_absence(
    tmp_path: Path, name: str, way: str
) -> None:
    equals_the_plain_loop(config_of(tmp_path, "pair", name=name), tmp_path, ways=[way])


@pytest.mark.parametrize("odd", REFUSED)
def test_a_layer_that_cannot_train_so_is_refused_by_name(tmp_path: Path, odd: str) -> None:
    config = config_of(tmp_path, "model", odd=odd)
    with pytest.raises(JobError, match=f"layer l1 .*{REFUSED[odd][1]}") as refusal:
        run_threads(job(config, ranks=2, schedule="1f1b", layers=4))
    assert not re.search(r"Traceback|AssertionError", str(refusal.value))


def test_a_sketch_among_parameters_is_refused_by_name(tmp_path: Path) -> None:
    model = ModelConfig(factory="odd_states:with_a_sketch", arguments={})
    with pytest.raises(JobError, match=r"parameter sketch.weight of layer l1 is on the meta device"):
        run_threads(job(small_config(tmp_path, model=model, steps=3), ranks=2, layers=4))


def test_one_tensor_as_several_outputs_in_some_passes_only_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(factory="odd_states:hands_on_twice_at_first", arguments={})
    config = small_config(tmp_path, model=model, steps=3)
    with pytest.raises(JobError, match="layer l1 returns one tensor as several outputs in some passes only"):
        run_threads(job(config, ranks=2, schedule="1f1b", layers=4))


@pytest.mark.parametrize(
    ("late", "what"),
    [
        ("LateHook", "does otherwise than when it was compared.* to be left to plain autograd now"),
        ("LateCheckpoint", "does otherwise than when it was compared.* as its graph has a checkpoint"),
        ("LateMode", "does otherwise than when it was compared.* its norm is in evaluation mode now"),
        ("LateModeOnce", "does otherwise than when it was compared.* its norm is in evaluation mode now"),
        ("LateCount", "changes its attribute counted in each forward pass"),
    ],
)
def test_a_layer_that_does_otherwise_later_is_refused_then(tmp_path: Path, late: str, what: str) -> None:
    model = ModelConfig(factory="late_switches:model", arguments={"late": late})
    run_threads(job(small_config(tmp_path, model=model, steps=8), ranks=2, layers=4))
    with pytest.raises(JobError, match=f"layer l1 {what}"):
        run_threads(job(small_config(tmp_path, model=model, steps=9), ranks=2, layers=4))


def test_an_attribute_that_a_layer_changes_later_is_told(tmp_path: Path) -> None:
    model = ModelConfig(factory="late_switches:model", arguments={"late": "LateFlag"})
    config = small_config(tmp_path, model=model, steps=9)
    run = run_threads(job(config, ranks=2, layers=4))
    told = [report.text for report in run.reports if isinstance(report, WarningReport)]
    assert len(told) == 1
    assert told[0].startswith("layer l1 has changed its attribute warm, which is no state of the model")
    assert run.state_sha256 == train_plainly(config, tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("counting", "changes its attribute passes in each pass"),
        ("averaging", r"changes its function \(its mean\) in each pass"),
        ("moving", "changes its parameter center in its forward pass"),
        ("drawing", "draws in its backward pass"),
        ("remembering", "computes something else each time"),
        ("going-back", "gives its parameter scale a gradient in its forward pass"),
        ("hooked", "has a hook on its parameter scale"),
        ("noting", ""),
        ("asking", ""),
        ("checkpointing", ""),
        ("counted-back", "does not train as in a plain loop: its gradient 0 of output 0 is another"),
        ("hooking", "does not train as in a plain loop: its gradient of scale is another"),
        ("looking-back", "does not train as in a plain loop: its value 1 is another"),
        ("locked", "cannot be copied.*cannot pickle"),
        ("scripted", "is a ScriptModule"),
        ("shifting", "changes its inputs or targets in place"),
        ("noting-on-a-buffer", "changes its attribute uses of center in each pass"),
        ("bounded", "changes its parameter scale in its forward pass"),
        ("masked", ""),
    ],
)
def test_a_loss_with_a_state_is_refused_and_one_that_notes_its_values_is_not(
    tmp_path: Path, name: str, what: str
) -> None:
    model = ModelConfig(factory="odd_losses:with_loss", arguments={"name": name})
    config = small_config(tmp_path, model=model, steps=3)
    if what:
        with pytest.raises(JobError, match=f"the loss {what}"):
            run_threads(job(config, ranks=2, schedule="1f1b", layers=4))
    else:
        equals_the_plain_loop(config, tmp_path, names=["layer0", "layer1", "layer2", "layer3"])


def test_what_a_loss_trains_is_part_of_the_last_layer(tmp_path: Path) -> None:
    """Its parameters, of which one is a matrix, and its buffer."""
    equals_the_plain_loop(
        config_of(tmp_path, "trained_loss"), tmp_path, names=["layer0", "layer1", "layer2", "layer3"]
    )


def test_a_function_that_hides_what_a_loss_trains_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "hidden_loss")
    with pytest.raises(
        JobError, match=r"the loss uses a parameter \[\] that nothing would train: return the module"
    ):
        run_threads(job(config, layers=4))
