"""Complete checkpoints of a job of three layers, and ways to damage their files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from planner.codec import json_values
from planner.plan import Plan
from workers.checkpoint.folder import checkpoint_folder, write_layer, write_manifest
from workers.checkpoint.manifest import FileRecord, Manifest, layer_files
from workers.config import OptimizerConfig
from workers.state.layer_state import LayerState, host_copy
from workers.state.optim import make_optimizer

NAMES = ("embedding", "block-0", "head")
FILES = [file for layer, name in enumerate(NAMES) for file in layer_files(layer, name)]
PLAN = Plan(
    epoch=1,
    version=0,
    reason="first",
    layers=((0, 2), (2, 3)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=4,
    replicas=1,
)


class Layer(nn.Module):
    """A layer with parameters of several shapes and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.gain = nn.Parameter(torch.tensor(1.5))


def trained(layer: int, seed: int, config: OptimizerConfig | None = None) -> LayerState:
    """The state of layer `layer` of `NAMES` after three steps, one of which gave a parameter no gradient."""
    torch.manual_seed(seed * 100 + layer)
    optimizer = make_optimizer(config or OptimizerConfig(), 10)
    state = LayerState.of(layer, NAMES[layer], Layer(), optimizer)
    for step in range(3):
        gradients = {name: torch.randn(tensor.shape) for name, tensor in state.weights.items()}
        if step == 1:
            del gradients["gain"]
        optimizer.update_(state, gradients, 1.0, optimizer.lr(step))
    state.buffers["norm.num_batches_tracked"].add_(3)
    return host_copy(state)


def saved(output: str, step: int, generation: int = 1) -> list[LayerState]:
    """Write a complete checkpoint; returns the states in it."""
    folder = checkpoint_folder(output, step, generation)
    states = [trained(layer, step) for layer in range(len(NAMES))]
    records = [record for state in states for record in write_layer(folder, state)]
    write_manifest(folder, manifest(step, generation, records))
    return states


def manifest(step: int, generation: int, records: list[FileRecord]) -> Manifest:
    return Manifest(
        step=step,
        generation=generation,
        spec={"job": {"name": "rehearsal", "seed": 7}, "optimizer": {"lr": 0.1, "clip_norm": None}},
        plan=json_values(PLAN),
        layers=NAMES,
        samples=32 * step,
        files={record.name: record for record in records},
    )


def job_folder(kind: str, tmp_path: Path) -> str:
    """A job folder, as a local path ("path") or through pyarrow's local filesystem ("uri")."""
    return str(tmp_path / "run") if kind == "path" else f"file://{tmp_path}/run"


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
