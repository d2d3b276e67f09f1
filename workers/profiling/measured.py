"""Measurements of the ranks, and how they become a profile. Values only: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from planner.profile import Cluster, DeviceProfile, LayerProfile, Link, ModelProfile, Noise, Profile
from workers.config import WorkerConfig
from workers.profiling.cost_settings import cost_settings

NOISE = 0.05
"""Ranks whose times differ by less count as equal."""


@dataclass(frozen=True, kw_only=True)
class ProcessorLoad:
    """The processors of one rank's machine while layers were measured."""

    window_s: float
    cores: int
    busy_s: float
    """Busy time of all cores together."""
    own_s: float
    """The rank's part of it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one rank, taken while all others took theirs."""

    rank: int
    layers: tuple[LayerProfile, ...]
    checked: bool
    """Whether each layer was compared with plain autograd first."""
    repeats_s: tuple[float, ...]
    """Per repeat, the computing time of all layers."""
    device: DeviceProfile
    links: tuple[tuple[Link | None, ...], ...]
    """Links between all ranks, the same on every rank."""
    commit_s: float
    receives_ahead: int
    """See `Cluster.receives_ahead`."""
    sends_kept: int
    """See `Cluster.sends_kept`."""
    load: ProcessorLoad | None = None
    """None: its system does not tell."""


def combine(measured: Sequence[Measured], config: WorkerConfig) -> Profile:
    """One profile, its `key`, `source` and date still empty: a layer's time is the median over ranks of each rank's
    median, and what traffic takes of computing the median over ranks.

    Args:
        measured: in rank order, of equal layers.
        config: what they were measured with.
    """
    layers = tuple(_layer(alike) for alike in zip(*(one.layers for one in measured), strict=True))
    devices = [one.device for one in measured]
    stream_s_per_byte = _median_of_known(device.stream_s_per_byte for device in devices)
    socket_s_per_byte = _median_of_known(device.socket_s_per_byte for device in devices)
    return Profile(
        model=ModelProfile(
            layers=layers,
            microbatch_size=config.pipeline.microbatch_size,
            precision=config.job.precision,
            threads=config.job.threads,
            checked=all(one.checked for one in measured),
            settings=cost_settings(config),
        ),
        cluster=Cluster(
            devices=tuple(
                replace(
                    device,
                    slowdown=slowdown,
                    stream_s_per_byte=stream_s_per_byte,
                    socket_s_per_byte=socket_s_per_byte,
                )
                for device, slowdown in zip(devices, _slowdowns(measured), strict=True)
            ),
            links=measured[0].links,
            commit_s=max(one.commit_s for one in measured),
            receives_ahead=measured[0].receives_ahead,
            sends_kept=measured[0].sends_kept,
        ),
        key="",
        source="",
        noise=Noise(others=_others(measured), spread=max(_spread(one.repeats_s) for one in measured)),
    )


def _others(measured: Sequence[Measured]) -> float:
    """The largest share of a machine's processors that was busy with something else than its ranks."""
    machines: dict[str, list[ProcessorLoad]] = {}
    for one in measured:
        if one.load is not None and one.load.window_s > 0:
            machines.setdefault(one.device.machine, []).append(one.load)
    shares = [
        max(load.busy_s / load.window_s for load in loads) - sum(load.own_s / load.window_s for load in loads)
        for loads in machines.values()
    ]
    cores = [loads[0].cores for loads in machines.values()]
    return max((min(1.0, max(0.0, share / of)) for share, of in zip(shares, cores, strict=True)), default=0.0)


def _spread(repeats_s: Sequence[float]) -> float:
    """Interquartile range of the repeats over their median."""
    if len(repeats_s) < 2:
        return 0.0
    low, middle, high = quantiles(repeats_s, n=4)
    return (high - low) / middle if middle > 0 else 0.0


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _layer(alike: Sequence[LayerProfile]) -> LayerProfile:
    """The same layer as all ranks saw it: medians of its times; its sizes are the same everywhere."""
    first = alike[0]
    weight_grad_s = median(layer.weight_grad_s for layer in alike)
    shares = [median(layer.matrices[i].weight_grad_s for layer in alike) for i in range(len(first.matrices))]
    whole = sum(shares) or 1.0
    return replace(
        first,
        forward_s=median(layer.forward_s for layer in alike),
        input_grad_s=median(layer.input_grad_s for layer in alike),
        weight_grad_s=weight_grad_s,
        update_s=median(layer.update_s for layer in alike),
        matrices=tuple(
            replace(matrix, weight_grad_s=weight_grad_s * share / whole)
            for matrix, share in zip(first.matrices, shares, strict=True)
        ),
    )


def _slowdowns(measured: Sequence[Measured]) -> list[float]:
    """Per rank, its time over the median rank's; 1 where the difference is within its own spread or `NOISE`."""
    own = [median(one.repeats_s) for one in measured]
    typical = median(own)
    slowdowns = []
    for one, seconds in zip(measured, own, strict=True):
        slowdown = seconds / typical
        slowdowns.append(1.0 if abs(slowdown - 1.0) <= max(NOISE, _spread(one.repeats_s)) else slowdown)
    return slowdowns
