"""Quality of a fitted model of interference, as lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from planner.interference.judgement import CANDIDATES, Judgement
from planner.wording import seconds

SHOWN = 8
"""Features that are named, of those that matter most."""


def fit_lines(judgement: Judgement) -> Iterator[str]:
    """The scores on neighbours that were left out, the features that matter, the calibration and the latency."""
    yield f"{judgement.windows} windows; each kind of neighbour was left out once, and predicted by the others:"
    for score in judgement.scores:
        kinds = ", ".join(f"{kind} {error:.1%}" for kind, error in score.by_kind)
        yield f"  {score.model:8} R2 {score.r2:.2f}, median error {score.median_error:.1%} ({kinds})"
    named = ", ".join(f"{name} {share:.0%}" for name, share in judgement.importances[:SHOWN])
    yield f"what matters: {named}"
    pairs = ", ".join(
        f"{predicted:.2f} -> {measured:.2f}" for predicted, measured, _ in judgement.calibration
    )
    yield f"predicted -> measured, by fifths: {pairs}"
    yield f"{CANDIDATES} candidates are predicted in {seconds(judgement.latency_s)}"
    for warning in judgement.warnings:
        yield f"warning: {warning}"
