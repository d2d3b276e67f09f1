"""The commit vector: one small record per rank, gathered at the end of every synchronous window.

When the all-gather returns, the step is committed: every rank holds the same records and so reaches the same
decision. Only then does any state change. Pure: records in, decision out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from workers.commit.freezing_scores import Energy, Moves, score_of, total_of
from workers.protocol.orders import Request

T = TypeVar("T")
OfShard = Mapping[str, T]
"""Findings for each parameter of a shard, by name."""

Prepared = tuple[int, int, str]
"""Epoch, version and digest of a plan."""


class CommitError(Exception):
    """The gathered records do not belong to one commit: no state may change."""


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """One rank's contribution to the commit of `step`."""

    rank: int
    """Its place."""
    generation: int
    step: int
    losses: dict[int, float] = field(default_factory=dict)
    """Global microbatch -> mean loss, from the ranks with the last stage."""
    shares: dict[int, float] = field(default_factory=dict)
    """Global microbatch -> share of its targets that its loss is a mean over, if the loss says so; else each counts
    as 1."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Global microbatch -> the samples read for it, from the ranks with the first stage."""
    squared_norms: dict[int, float] = field(default_factory=dict)
    """Layer -> sum of squares of its summed gradient, from the first rank that holds the layer."""
    parameter_norms: dict[int, dict[str, float]] = field(default_factory=dict)
    """Instead, where states are shared out: layer -> parameter -> sum of squares, from each rank for its shard."""
    busy_s: float = 0.0
    """Time that the rank computed in this window."""
    requests: tuple[Request, ...] = ()
    prepared: Prepared | None = None
    """The newest freeze plan that it has prepared."""
    next_plan: Prepared | None = None
    """The newest pipeline plan that it could follow from the next step on."""
    scores: dict[int, float] = field(default_factory=dict)
    """Layer -> AutoFreeze's score, at a check, where it does not follow from `moves`. This, like the next three, from
    the first rank that holds the layer, or where states are shared out from each rank for its shard."""
    moves: dict[int, dict[str, Moves]] = field(default_factory=dict)
    """Layer -> parameter -> what AutoFreeze's score follows from, at a check."""
    stable: dict[int, int] = field(default_factory=dict)
    """Layer -> the parameters that APF considers stable, at a check: one bit each, see `flags_of`."""
    energies: dict[int, Energy] = field(default_factory=dict)
    """Layer -> estimated squared norm of its summed gradient with nothing frozen, and the expected part of it
    that the step's freezing let through; if the job freezes."""
    parameter_energies: dict[int, dict[str, Energy]] = field(default_factory=dict)
    """Instead, where states are shared out: layer -> parameter -> the same, from each rank for its shard."""
    bases_done: bool = True
    """Whether this rank no longer waits for the base of any copy."""
    snapshot: int = 0
    """Step of the newest snapshot of which this rank has all that it is to have; 0: none."""
    snapshot_given_up: int = 0
    """Step of the newest snapshot that this rank cannot complete; 0: none."""
    files: dict[str, dict[str, list[int | str]]] = field(default_factory=dict)
    """Checkpoint files that it finished since the last commit: folder -> name -> `FileRecord.told`."""
    files_s: dict[str, float] = field(default_factory=dict)
    """Folder -> how long it wrote them."""
    files_errors: dict[str, str] = field(default_factory=dict)
    """Folder -> why it could not finish its files there."""


@dataclass(frozen=True, kw_only=True)
class CommitDecision:
    """The decision that follows from the records, the same on every rank."""

    step: int
    loss: float
    """Mean over all targets of the step; over its global microbatches where the loss tells no shares."""
    grad_norm: float
    """Global norm of the gradient of `loss`, before clipping."""
    scale: float
    """Factor from the summed gradient to the one that the optimizer uses: mean and clipping combined."""
    lr: float
    """Learning rate of the step."""
    skipped: bool
    """The norm is not finite, or there was no target: no weight is updated."""
    targets: bool = True
    """Whether any sample of the step has a target."""
    shares: float = 1.0
    """Sum of the microbatches' shares: the divisor from the summed gradient to that of `loss`."""
    requests: frozenset[Request]
    busy_s: float
    """Mean over ranks."""
    samples: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Global microbatch -> the samples it used."""
    bases_done: bool = True
    """Whether no rank waits for the base of a copy any longer."""
    snapshot: int = 0
    """Step of the newest snapshot that is complete on all ranks."""
    snapshot_given_up: int = 0
    """Step of the newest one that some rank cannot complete."""
    adopt: Prepared | None = None
    """The new freeze plan that all ranks follow from the next step on, if any."""
    switch: Prepared | None = None
    """The pipeline plan that all ranks follow from the next step on, if all are ready for one."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """All layers' scores at AutoFreeze's check; else empty."""
    stable: Mapping[int, int] = field(default_factory=dict)
    """All layers' stable parameters at APF's check; else empty."""
    gradient_energy: float = 0.0
    """Squared norm of the mean gradient, estimated as if nothing had been frozen."""
    norms: tuple[float, ...] = ()
    """Per layer, the norm of its gradient of `loss`, before clipping; 0 where none was formed."""
    estimated_norms: tuple[float, ...] = ()
    """Per layer, the same, estimated as if nothing had been frozen; empty where the ranks estimate none."""
    effective_update: float = 1.0
    """Share of it that the step's freezing let through (TimelyFreeze definition D.7)."""


def decide(
    records: Sequence[CommitRecord],
    *,
    microbatches: int,
    layers: int,
    clip_norm: float | None,
    lr: float,
    newest: tuple[int, int] | None = None,
    shards: int = 1,
) -> CommitDecision:
    """The decision of a commit.

    The global norm is a float64 sum in layer order; the loss is a float64 sum in order of global microbatch, each of
    which counts by its share of targets.

    Args:
        records: one per rank.
        microbatches: R * M, the global microbatches of a step.
        layers: number of layers of the entire model.
        lr: learning rate of the step.
        newest: epoch and version of the newest freeze plan adopted so far.
        shards: of each layer.

    Raises:
        CommitError: the records belong to several commits, or a loss or a norm is missing.
    """
    first = records[0]
    strangers = [r.rank for r in records if (r.generation, r.step) != (first.generation, first.step)]
    if strangers:
        raise CommitError(f"ranks {strangers} came to another commit than step {first.step}")
    losses = {g: loss for record in records for g, loss in record.losses.items()}
    if shards == 1:
        norms = {layer: norm for record in records for layer, norm in record.squared_norms.items()}
    else:
        found = _of_shards(records, "gradient norms", [record.parameter_norms for record in records], shards)
        norms = {layer: _added_up(of_parameters) for layer, of_parameters in found.items()}
    _check_complete("losses of microbatches", losses, microbatches, first.step)
    _check_complete("gradient norms of layers", norms, layers, first.step)
    total = 0.0
    for layer in range(layers):
        total += norms[layer]
    told = {g: share for record in records for g, share in record.shares.items()}
    loss = shares = 0.0
    for microbatch in range(microbatches):
        share = told.get(microbatch, 1.0)
        loss += share * losses[microbatch]
        shares += share
    divisor = shares or 1.0
    grad_norm = math.sqrt(total) / divisor if total >= 0 else math.nan
    skipped = not math.isfinite(grad_norm) or not shares
    clip = 1.0
    if clip_norm is not None and not skipped and grad_norm > clip_norm:
        clip = clip_norm / grad_norm
    energies = _energies(records, layers, shards)
    energy, effective = _effective_update(energies)
    return CommitDecision(
        step=first.step,
        loss=loss / divisor,
        grad_norm=grad_norm,
        scale=clip / divisor,
        lr=lr,
        skipped=skipped,
        targets=bool(shares),
        shares=divisor,
        requests=frozenset(request for record in records for request in record.requests),
        busy_s=sum(record.busy_s for record in records) / len(records),
        samples={g: indices for record in records for g, indices in record.samples.items()},
        bases_done=all(record.bases_done for record in records),
        snapshot=min(record.snapshot for record in records),
        snapshot_given_up=max(record.snapshot_given_up for record in records),
        adopt=_agreed([record.prepared for record in records], newest),
        switch=_agreed([record.next_plan for record in records], None),
        scores=_scores(records),
        stable=_stable(records),
        norms=tuple(
            math.sqrt(norms[layer]) / divisor if norms[layer] >= 0 else math.nan for layer in range(layers)
        ),
        estimated_norms=tuple(math.sqrt(each) / divisor if each >= 0 else math.nan for each, _ in energies),
        gradient_energy=grad_norm * grad_norm if energy is None else energy / divisor**2,
        effective_update=effective,
    )


def _of_shards(
    records: Sequence[CommitRecord], what: str, brought: Iterable[Mapping[int, OfShard[T]]], shards: int
) -> dict[int, list[T]]:
    """Layer -> what its shards brought for each of its parameters, in name order: as a rank finds it that has the whole
    layer."""
    parts = _by_layer(brought)
    for layer, of_shards in parts.items():
        if len(of_shards) != shards:
            raise CommitError(
                f"commit {records[0].step} has {what} of {len(of_shards)} of {shards} shards of layer {layer}"
            )
    return {layer: _in_name_order(of_shards) for layer, of_shards in parts.items()}


def _by_layer(brought: Iterable[Mapping[int, OfShard[T]]]) -> dict[int, list[OfShard[T]]]:
    found: dict[int, list[OfShard[T]]] = {}
    for of_rank in brought:
        for layer, of_shard in of_rank.items():
            found.setdefault(layer, []).append(of_shard)
    return found


def _in_name_order(of_shards: Iterable[OfShard[T]]) -> list[T]:
    of_parameters = {name: each for of_shard in of_shards for name, each in of_shard.items()}
    return [of_parameters[name] for name in sorted(of_parameters)]


def _added_up(norms: Iterable[float]) -> float:
    total = 0.0
    for norm in norms:
        total += norm
    return total


def _scores(records: Sequence[CommitRecord]) -> dict[int, float]:
    """Layer -> AutoFreeze's score."""
    scores = {layer: score for record in records for layer, score in record.scores.items()}
    moves = _by_layer(record.moves for record in records)
    return scores | {layer: score_of(_in_name_order(of_shards)) for layer, of_shards in moves.items()}


def _stable(records: Sequence[CommitRecord]) -> dict[int, int]:
    """Layer -> the parameters that APF considers stable in any of its shards."""
    flags: dict[int, int] = {}
    for record in records:
        for layer, own in record.stable.items():
            flags[layer] = flags.get(layer, 0) | own
    return flags


def _check_complete(what: str, brought: Mapping[int, float], count: int, step: int) -> None:
    if sorted(brought) != list(range(count)):
        raise CommitError(f"commit {step} lacks or exceeds {what}: {sorted(brought)} of {count} came")


def _energies(records: Sequence[CommitRecord], layers: int, shards: int) -> list[Energy]:
    """By layer, the estimated energy of the summed gradient, and the part let through; empty if the ranks estimate
    none."""
    energies = {layer: pair for record in records for layer, pair in record.energies.items()}
    brought = [record.parameter_energies for record in records]
    energies |= {
        layer: total_of(of_parameters)
        for layer, of_parameters in _of_shards(records, "energies", brought, shards).items()
    }
    return [energies[layer] for layer in range(layers)] if energies else []


def _effective_update(energies: Sequence[Energy]) -> tuple[float | None, float]:
    """The estimated energy of the summed gradient, if the ranks estimate it, and the share of definition D.7;
    float64 sums in layer order."""
    if not energies:
        return None, 1.0
    energy, through = total_of(energies)
    return energy, through / energy if energy > 0.0 and math.isfinite(energy) else 1.0


def _agreed(brought: Sequence[Prepared | None], newest: tuple[int, int] | None) -> Prepared | None:
    """The plan that every rank has prepared, if it is the same one and newer than `newest`."""
    prepared = brought[0]
    if prepared is None or any(other != prepared for other in brought):
        return None
    return prepared if newest is None or prepared[:2] > newest else None
