"""Freezing statistics by parameter: a layer's are put together from its shards', and shards' are chosen from a layer's.

A statistic without a dimension is the layer's, and the same in all shards. Of each parameter in name order, the others
have one number, or one for every scalar that a check looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from planner.freezing import looked_at
from workers.protocol.errors import JobError

Statistics = Mapping[str, Tensor]
"""By name."""

OF_SCALARS = frozenset({"reference", "trend", "travel"})
"""The statistics that have a number for every scalar that a check looks at."""


def put_together(parts: Sequence[tuple[Statistics, Mapping[str, int]]]) -> dict[str, Tensor]:
    """The statistics of a layer.

    Args:
        parts: statistics of each shard, and the scalars of each of its trained parameters.

    Raises:
        JobError: they are not of these parameters.
    """
    first, _ = parts[0]
    found: dict[str, Tensor] = {}
    for key, value in first.items():
        if not value.dim():
            found[key] = value
            continue
        of_parameters: dict[str, Tensor] = {}
        for statistics, scalars in parts:
            of_parameters |= _by_parameter(statistics, key, scalars)
        found[key] = _flat(of_parameters, like=value)
    return found


def chosen(
    statistics: Statistics, scalars: Mapping[str, int], wanted: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Statistics of the parameters for which `wanted` holds.

    Args:
        scalars: of each trained parameter that `statistics` are of.

    Raises:
        JobError: they are not of these parameters.
    """
    if all(map(wanted, scalars)):
        return dict(statistics)
    found: dict[str, Tensor] = {}
    for key, value in statistics.items():
        if not value.dim():
            found[key] = value
            continue
        of_parameters = _by_parameter(statistics, key, scalars)
        found[key] = _flat({name: of_parameters[name] for name in of_parameters if wanted(name)}, like=value)
    return found


def _by_parameter(statistics: Statistics, key: str, scalars: Mapping[str, int]) -> dict[str, Tensor]:
    names = sorted(scalars)
    sizes = [looked_at(statistics, scalars[name]) if key in OF_SCALARS else 1 for name in names]
    if statistics[key].numel() != sum(sizes):
        raise JobError(
            f"freezing statistic {key} has {statistics[key].numel()} numbers, but parameters {', '.join(names)} have"
            f" {sum(sizes)}: use the [model] and [freeze] settings that the state was saved with"
        )
    return dict(zip(names, statistics[key].split(sizes), strict=True))


def _flat(of_parameters: Mapping[str, Tensor], like: Tensor) -> Tensor:
    # A shard that has just arrived lies on the host, one of this rank's own may not.
    parts = [of_parameters[name].to(like.device) for name in sorted(of_parameters)]
    return torch.cat(parts or [like[:0]])
