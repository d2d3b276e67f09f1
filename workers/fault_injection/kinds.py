"""The names of faults and of the points where they can fire. Nothing else."""

from __future__ import annotations

from enum import StrEnum


class FaultPhase(StrEnum):
    """Points in a rank's life where a fault can fire."""

    FORWARD = "forward"
    """Before each forward pass of a microbatch; the step is the one being computed."""
    BACKWARD = "backward"
    """Before each backward pass, whole or of the input gradient."""
    BEFORE_COMMIT = "before-commit"
    """The gradients are final and sent; the record is not sent."""
    IN_COMMIT = "in-commit"
    """This rank has received all records but not kept them; other ranks may have."""
    AFTER_COMMIT = "after-commit"
    """The update of the committed step is done."""
    SAVING = "saving"
    """Before each layer and the manifest of a checkpoint is written; the step is the checkpoint's."""
    MIGRATING = "migrating"
    """Before a rank fetches a layer's state from another rank, as its new owner or standby. The source does not pass
    here."""
    RECOVERING = "recovering"
    """Between two generations; the step is the newest that this rank has committed."""


class FaultKind(StrEnum):
    """Kinds of fault."""

    KILL = "kill"
    """SIGKILL of the rank's process."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    SLOW = "slow"
    """Every action takes `factor` times as long, for `steps` steps."""
    DROP_LINK = "drop-link"
    """The rank's connections to all other ranks break; its process lives."""
    THROTTLE_LINK = "throttle-link"
    """The rank sends to each other rank at `bytes_per_s`, for `steps` steps."""
    FILL_DISK = "fill-disk"
    """Writes of checkpoints fail with ENOSPC: `times` of them, or all for `seconds`."""
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"
    """One bit of the newest checkpoint flips; nothing happens where there is none yet."""
    RAISE = "raise"
    """An exception, as if a layer had raised it."""
    DRAIN = "drain"
    """The rank gets notice that it has `seconds` left, and is killed when they are over."""
    NAN = "nan"
    """The step's gradients of this rank hold a NaN."""
    OOM = "oom"
    """The rank's tensors may take `limit_bytes` in a step's window, for `steps` steps: allocations beyond fail."""
    BLIND = "blind"
    """This rank loses the commit's records, as if its connections had failed within the gather."""
