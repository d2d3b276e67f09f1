"""Jobs that start from given weights: what the file must contain, and the same bits on any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from safetensors.torch import load_file, save_file

from benchmarks.parts.rank_threads import run_threads
from workers.checkpoint.folder import (
    DamagedCheckpointError,
    checkpoints,
    export,
    read_layer,
    read_manifest,
)
from workers.checkpoint.initial_weights import check_weights, pinned, read_weights
from workers.config import CheckpointConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.models.definition import ParameterRef
from workers.protocol.errors import JobError
from workers.state.layer_state import LayerState
from workers.state.optim import AdamW

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 3)}


def write(file: Path, **changes: torch.Tensor | None) -> str:
    tensors = {key: torch.ones(shape) for key, shape in SHAPES.items()}
    given = {key.replace("__", "."): tensor for key, tensor in changes.items()}
    save_file({key: t for key, t in {**tensors, **given}.items() if t is not None}, file)
    return str(file)


def test_errors_name_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    wrong = write(file, a__bias=None, lm__head=torch.ones(1), b__weight=torch.ones(3, 2))
    with pytest.raises(JobError) as error:
        check_weights(wrong, SHAPES, ())
    assert "lacks a.bias" in str(error.value)
    assert "also holds lm.head" in str(error.value)
    assert "b.weight is [3, 2] and [2, 3] in the model" in str(error.value)
    with pytest.raises(JobError, match="lacks x0, x1, x2, x3, x4 and 2 more"):
        check_weights(write(file), {**SHAPES, **{f"x{n}": (1,) for n in range(7)}}, ())
    tie = (ParameterRef("a", "weight"), ParameterRef("b", "weight"))
    check_weights(write(file), SHAPES, (tie,))
    with pytest.raises(JobError, match=r"ties a\.weight and b\.weight, and their values differ"):
        check_weights(write(file, b__weight=torch.zeros(2, 3)), SHAPES, (tie,))


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / "pickled.pt")
    for name in ("pickled.pt", "missing.safetensors"):
        with pytest.raises(JobError, match=r"cannot be read: .*`freshet export` writes one"):
            check_weights(str(tmp_path / name), SHAPES, ())


def test_a_layer_takes_its_own_tensors_in_its_own_dtype(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    path = write(tmp_path / "w.safetensors", a__weight=values.half(), b__weight=None)
    state = LayerState.of(0, "a", torch.nn.Linear(3, 2), AdamW(OptimizerConfig(), 1))
    read_weights(path, [state])
    assert state.weights["weight"].dtype == torch.float32
    assert torch.equal(state.weights["weight"], values)
    with pytest.raises(JobError, match=r"lacks b\.weight, b\.bias"):
        read_weights(path, [LayerState.of(1, "b", torch.nn.Linear(3, 2), AdamW(OptimizerConfig(), 1))])


def starting_from(config: WorkerConfig, path: Path) -> WorkerConfig:
    model = ModelConfig(**{**config.model.model_dump(), "weights": str(path)})
    return config.model_copy(update={"model": model})


@pytest.mark.parametrize("trait", ["batchnorm", "tied"])
def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path, trait: str) -> None:
    """This includes buffers and tied parameters. The weights take effect from the first step on."""
    first = small_config(tmp_path / "first", trait)
    trained = run_threads(job(first, stop_at=2))
    assert trained.outcomes[0].stopped
    path = tmp_path / "w.safetensors"
    export(first.job.folder, str(path))

    still = starting_from(small_config(tmp_path / "still", trait, steps=1), path)
    still = still.model_copy(update={"optimizer": OptimizerConfig(lr=1e-30, weight_decay=0.0)})
    run_threads(job(still, stop_at=1))
    (ref,) = checkpoints(still.job.folder)
    manifest, given = read_manifest(ref), load_file(path)
    for layer, name in enumerate(manifest.layers):
        for key, weight in read_layer(ref, manifest, layer).weights.items():
            assert torch.equal(weight, given[f"{name}.{key}"])

    config = starting_from(small_config(tmp_path / "one", trait), path)
    expected = run_threads(job(config)).state_sha256
    assert expected != run_threads(job(small_config(tmp_path / "fresh", trait))).state_sha256
    for ranks, schedule in ((2, "zbv"), (4, "1f1b")):
        assert run_threads(job(config, ranks=ranks, schedule=schedule)).state_sha256 == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_run_gives_what_its_export_would(ranks: int, tmp_path: Path) -> None:
    """Its newest checkpoint, also after it has written more: the path of one is what ranks read."""
    first = small_config(tmp_path / "first", "tied", checkpoint=CheckpointConfig(every_steps=1, keep=9))
    run_threads(job(first, stop_at=2))
    file = tmp_path / "w.safetensors"
    export(first.job.folder, str(file))
    expected = run_threads(job(starting_from(small_config(tmp_path / "one", "tied"), file))).state_sha256
    path, sha256 = pinned(first.job.folder)
    assert path == checkpoints(first.job.folder)[0].path
    assert sha256 is not None
    run_threads(job(first, stop_at=3, start=checkpoints(first.job.folder)[0], generation=2))
    assert pinned(first.job.folder)[0] != path
    assert pinned(path) == (path, sha256)
    config = starting_from(small_config(tmp_path / "two", "tied"), Path(path))
    assert run_threads(job(config, ranks=ranks)).state_sha256 == expected
    shapes = {key: tuple(t.shape) for key, t in load_file(file).items()}
    check_weights(path, shapes, ())
    with pytest.raises(JobError, match=r"it lacks x\.y"):
        check_weights(path, {**shapes, "x.y": (1,)}, ())


def test_a_checkpoint_that_was_deleted_since_is_the_weights_fault(tmp_path: Path) -> None:
    """And not that of the job's own checkpoints, which ranks would then pass over."""
    state = LayerState.of(0, "l0", torch.nn.Linear(3, 2), AdamW(OptimizerConfig(), 1))
    with pytest.raises(JobError, match=r"model\.weights = .*Its run may have deleted it since") as error:
        read_weights(str(tmp_path / "checkpoints" / "step-00000002-gen-1"), [state])
    assert not isinstance(error.value, DamagedCheckpointError)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    told = (
        "is neither a safetensors file, named so, nor the folder of a run with a checkpoint, nor a checkpoint"
    )
    with pytest.raises(JobError, match=told):
        pinned(str(tmp_path))
    with pytest.raises(
        JobError, match=r"model\.weights = .* does not exist: name a safetensors file, or the folder"
    ):
        pinned(str(tmp_path / "nowhere"))


def test_a_checkpoint_counts_more_than_the_file(tmp_path: Path) -> None:
    first = small_config(tmp_path / "first")
    run_threads(job(first, stop_at=1))
    path = tmp_path / "w.safetensors"
    export(first.job.folder, str(path))
    whole = run_threads(job(starting_from(small_config(tmp_path / "whole"), path))).state_sha256
    config = starting_from(small_config(tmp_path / "halves"), path)
    run_threads(job(config, stop_at=3))
    path.unlink()
    resumed = run_threads(job(config, ranks=2, start=checkpoints(config.job.folder)[0], generation=2))
    assert resumed.state_sha256 == whole
