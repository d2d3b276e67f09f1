"""The commit vector: one small record per rank, gathered at the end of every synchronous window.

When the gathering returns, the step is committed: every rank holds the same records and so draws the same
conclusion. Only then does anything change. Pure: records in, decision out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from workers.protocol import Request


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """What one rank brings to the commit of `step`."""

    rank: int
    generation: int
    step: int
    losses: dict[int, float] = field(default_factory=dict)
    """Global microbatch -> mean loss, from the ranks with the last stage."""
    squared_norms: dict[int, float] = field(default_factory=dict)
    """Layer -> sum of squares of its summed gradient, from the layer's first holder."""
    busy_s: float = 0.0
    """Time it computed in this window."""
    requests: tuple[Request, ...] = ()
    files: dict[str, dict[str, list[int | str]]] = field(default_factory=dict)
    """Checkpoint files it has finished since the last commit: folder -> name -> [bytes, sha256]."""
    files_errors: dict[str, str] = field(default_factory=dict)
    """Folder -> why it could not finish its files there."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(text: bytes) -> CommitRecord:
        fields = json.loads(text)
        for keyed in ("losses", "squared_norms"):
            fields[keyed] = {int(k): v for k, v in fields[keyed].items()}
        fields["requests"] = tuple(Request(r) for r in fields["requests"])
        return CommitRecord(**fields)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from the records, the same on every rank."""

    step: int
    loss: float
    """Mean over all global microbatches."""
    grad_norm: float
    """Global norm of the mean gradient, before clipping."""
    scale: float
    """Factor from the summed gradient to the one the optimizer sees: mean and clip at once."""
    skipped: bool
    """The norm is not finite: nothing is updated."""
    requests: frozenset[Request]
    busy_s: float
    """Mean over ranks."""


def settle(
    records: Sequence[CommitRecord], *, microbatches: int, layers: int, clip_norm: float | None
) -> Decision:
    """The decision of a commit.

    The global norm is a float64 sum in layer order; the loss is a float64 sum in order of global microbatch.

    Args:
        records: one per rank.
        microbatches: R * M, the global microbatches of a step.
        layers: of the whole model.
    """
    first = records[0]
    strangers = [r.rank for r in records if (r.generation, r.step) != (first.generation, first.step)]
    assert not strangers, f"ranks {strangers} came to another commit than step {first.step}"
    losses = {g: loss for record in records for g, loss in record.losses.items()}
    norms = {layer: norm for record in records for layer, norm in record.squared_norms.items()}
    assert sorted(losses) == list(range(microbatches)), f"losses of microbatches {sorted(losses)}"
    assert sorted(norms) == list(range(layers)), f"norms of layers {sorted(norms)}"
    total = 0.0
    for layer in range(layers):
        total += norms[layer]
    grad_norm = math.sqrt(total) / microbatches if total >= 0 else math.nan
    skipped = not math.isfinite(grad_norm)
    clip = 1.0
    if clip_norm is not None and not skipped and grad_norm > clip_norm:
        clip = clip_norm / grad_norm
    loss = 0.0
    for microbatch in range(microbatches):
        loss += losses[microbatch]
    return Decision(
        step=first.step,
        loss=loss / microbatches,
        grad_norm=grad_norm,
        scale=clip / microbatches,
        skipped=skipped,
        requests=frozenset(request for record in records for request in record.requests),
        busy_s=sum(record.busy_s for record in records) / len(records),
    )
