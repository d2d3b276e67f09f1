"""Numbers as people read them: seconds, bytes, rates, shares. Knows nothing of jobs or of where text goes."""

from __future__ import annotations

import math


def significant(value: float) -> str:
    """Three significant digits, no exponent between a thousandth and a million: `0.812`, `12.4`, `3,120`."""
    if not math.isfinite(value):
        return "not finite"
    size = float(f"{abs(value):.3g}")
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def rate(per_s: float) -> str:
    """A rate with a decimal prefix and three significant digits: `845`, `12.4k`, `1.20M`."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_s >= 0.9995 * factor:
            return significant(per_s / factor) + prefix
    return significant(per_s)


def operations(count: float) -> str:
    """A number of floating-point operations with a decimal prefix: `12 FLOP`, `1.24 TFLOP`."""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * factor:
            return f"{significant(count / factor)} {prefix}FLOP"
    return f"{count:.0f} FLOP"


def seconds(value_s: float) -> str:
    """A duration in its own unit: `183 ms`, `1.83 s`, `2 min 05 s`, `1 h 02 min`."""
    if value_s < 0.9995e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 0.9995:
        return f"{significant(value_s * 1e3)} ms"
    if value_s < 59.95:
        return f"{significant(value_s)} s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count_bytes: float) -> str:
    """A size with a decimal prefix: `512 B`, `1.24 MB`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count_bytes >= 0.9995 * factor:
            return f"{significant(count_bytes / factor)} {unit}"
    return f"{count_bytes:.0f} B"


def percent(share: float) -> str:
    """`0.182` -> `18.2 %`."""
    return f"{100 * share:.1f} %"


def deviation(share: float) -> str:
    """`0.031` -> `+3.1 %`."""
    return f"{100 * share:+.1f} %"
