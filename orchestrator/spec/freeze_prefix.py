"""Checks and settles what `[freeze]` says of the prefix: layers frozen as a whole, from the input up."""

from __future__ import annotations

from itertools import pairwise

from planner.freezing import prefix_rule
from workers.config import CHECK_EVERY, FreezeConfig
from workers.protocol.errors import JobError

LEAST_LAYERS = 4
"""Layers of a model of which PipeTransformer's rule can freeze any: the first, the last and two between them, of which
one stays."""


def check_prefix(freeze: FreezeConfig, *, table: bool) -> None:
    """Check the keys of the prefix by themselves.

    Args:
        table: whether the schedule is a user's own table.

    Raises:
        JobError: names the keys, their values and the way out.
    """
    if prefix_rule(freeze.method) != "prefix":
        for key, given in (("prefix", freeze.prefix is not None), ("schedule", bool(freeze.schedule))):
            if given:
                raise JobError(
                    f'freeze.{key} is for freeze.method = "prefix" or "timelyfreeze+prefix", and the method is'
                    f" {freeze.method!r}: leave the key out, or set one of these"
                )
    elif (freeze.prefix is None) == (not freeze.schedule):
        raise JobError(
            f'freeze.method = "{freeze.method}" takes either freeze.prefix, a number of layers, or freeze.schedule,'
            f" pairs of step and layers; {'both are' if freeze.schedule else 'none is'} given"
        )
    steps = [step for step, _ in freeze.schedule]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise JobError(
            f"freeze.schedule has steps {steps}: give them in ascending order, each once, as [[100, 2], [300, 4]]"
        )
    if freeze.by_prefix and freeze.method != "autofreeze" and table:
        raise JobError(
            f"freeze.method = {freeze.method!r} takes the backward passes of whole layers out of the schedule, which a"
            " user's own table has: use a schedule by name, or another method"
        )


def check_prefix_fits(freeze: FreezeConfig, layers: int) -> None:
    """Check them for a model of so many layers.

    Raises:
        JobError: the last layer would be frozen, or no layer can be.
    """
    if prefix_rule(freeze.method) == "pipetransformer" and layers < LEAST_LAYERS:
        raise JobError(
            f"freeze.method = {freeze.method!r} freezes layers between the first and the last, all but one of them, and"
            f" the model has {layers} layers: it takes at least {LEAST_LAYERS}"
        )
    if prefix_rule(freeze.method) != "prefix":
        return
    most = max([freeze.prefix or 0, *(frozen for _, frozen in freeze.schedule)])
    if most >= layers:
        raise JobError(
            f"freeze.{'schedule' if freeze.schedule else 'prefix'} freezes {most} layers, and the model has {layers}:"
            f" the last one is always trained, so give {layers - 1} at most"
        )


def lasting_prefix(freeze: FreezeConfig) -> int:
    """Layers, from the input up, that the job freezes as a whole from its first step to its last."""
    given = freeze.prefix if prefix_rule(freeze.method) == "prefix" and freeze.thaw == "never" else None
    return given or 0


def dropped_prefix(freeze: FreezeConfig) -> int:
    """Layers among these whose backward passes the job's first plan leaves out."""
    return 0 if freeze.pack == "off" else lasting_prefix(freeze)


def settle_checks(freeze: FreezeConfig, epoch_steps: int) -> FreezeConfig:
    """`freeze` with a number of steps between checks.

    Args:
        epoch_steps: steps of an epoch.
    """
    every = freeze.check_every
    if every is None:
        every = "epoch" if prefix_rule(freeze.method) == "pipetransformer" else CHECK_EVERY
    return freeze.model_copy(update={"check_every": epoch_steps if every == "epoch" else every})
