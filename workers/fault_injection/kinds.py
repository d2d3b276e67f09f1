"""The names of what a drill does, and of the places where it can strike. Nothing else."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Places in a rank's life where a drill can strike."""

    FORWARD = "forward"
    """Before each forward pass of a microbatch; the step is the one being computed."""
    BACKWARD = "backward"
    """Before each backward pass, whole or of the input gradient."""
    BEFORE_COMMIT = "before-commit"
    """Gradients are final and sent, the record is not."""
    IN_COMMIT = "in-commit"
    """All records have come to this rank; it has not kept them, others may have."""
    AFTER_COMMIT = "after-commit"
    """The update of the committed step is done."""
    SAVING = "saving"
    """Before each layer and the manifest of a checkpoint is written; the step is the checkpoint's."""
    MIGRATING = "migrating"
    """Before each layer's state is fetched from another rank, by who is to own it or to keep a copy of it. Who gives it
    does not pass here."""
    RECOVERING = "recovering"
    """Between two generations; the step is the newest that this rank has committed."""


class FaultKind(StrEnum):
    """What a drill does."""

    KILL = "kill"
    """SIGKILL of the rank's process."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    SLOW = "slow"
    """Every action takes `factor` times as long, for `steps` steps."""
    DROP_LINK = "drop-link"
    """All connections to other ranks are severed; the process lives."""
    THROTTLE_LINK = "throttle-link"
    """What the rank sends to its neighbours in a window leaves at `bytes_per_s`, for `steps` steps."""
    FILL_DISK = "fill-disk"
    """Writes of checkpoints fail with ENOSPC: `times` of them, or all for `seconds`."""
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"
    """One bit of the newest checkpoint changes; where there is none yet, nothing."""
    RAISE = "raise"
    """An exception, as if a layer had raised it."""
    DRAIN = "drain"
    """The rank is told that it has `seconds` to go, and killed when they are over."""
    NAN = "nan"
    """The step's gradients of this rank hold a NaN."""
    BLIND = "blind"
    """The commit's records have come, and are lost to this rank as if its connections had failed within the gather."""
