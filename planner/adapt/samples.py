"""Plausibility of sampled features: the interference model sees only plausible ones. Pure."""

from __future__ import annotations

import math

from planner.features import SAMPLED, VERSION, FeatureSample

MOST_OF_UNIT = {
    "share": 10.0,
    "0 or 1": 1.0,
    "degrees C": 200.0,
    "count": 1e6,
    "cores": 1e6,
    "tasks per core": 1e6,
    "bytes/s": 1e14,
    "1/s": 1e10,
}
"""Unit -> largest value that is believed. A share of a limit, such as power, may exceed 1."""
_MOST = {feature.name: MOST_OF_UNIT[feature.unit] for feature in SAMPLED}
_SHOWN = 3


def believed(sample: FeatureSample) -> tuple[dict[str, float], str]:
    """(the features that can be, what is wrong with the others or "")."""
    if sample.version != VERSION:
        return {}, f"they are of version {sample.version}, this program knows version {VERSION}"
    if not (math.isfinite(sample.window_s) and sample.window_s > 0):
        return {}, f"they were sampled over {sample.window_s} s"
    found: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in sample.values:
        if name not in _MOST:
            wrong.append(f"there is no feature {name[:40]!r}")
        elif not 0 <= value <= _MOST[name]:
            wrong.append(f"{name} is {value:.4g}")
        else:
            found[name] = value
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return found, ", ".join(wrong[:_SHOWN]) + more
