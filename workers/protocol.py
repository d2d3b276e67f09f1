"""The messages between ranks and controller. Dataclasses, no logic, no torch: any process can read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Request(StrEnum):
    """What the controller drops into a rank's mailbox. It rides in the next commit vector, so that all ranks
    act on it at the same commit; one rank's mailbox is enough."""

    CHECKPOINT = "checkpoint"
    """Write a checkpoint of the step being committed, go on."""
    STOP = "stop"
    """End after the step being committed, with a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership of the process group."""

    number: int
    epoch: int
    """Incarnation of the controller that formed it."""
    members: tuple[int, ...]
    """Global ranks."""
    store_host: str
    store_port: int
    timeout_s: float
    """How long a collective or a receive may wait."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One settled step, sent by the first rank."""

    generation: int
    step: int
    """1 for the first step of the job."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    samples: int
    tokens: int
    """Tokens in the step's samples; 0 where there are none."""
    step_s: float
    """From the commit before to this commit."""
    bubble: float
    """Share of the step that the ranks were not computing, mean over ranks; in [0, 1]."""
    skipped: bool
    """The norm was not finite: the step was committed with no update."""


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """A checkpoint was finished, or failed and was dropped (the ones before it stay)."""

    step: int
    path: str
    bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """One action as it ran."""

    action: str
    """Its token, e.g. `2F0`."""
    start_s: float
    """After its input had arrived; seconds since the commit before."""
    end_s: float


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """What one rank did in one step."""

    step: int
    rank: int
    step_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """Text sampled from the trained model."""

    step: int
    prompt: str
    text: str


Report = StepReport | ValidationReport | CheckpointReport | TimelineReport | SampleReport


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank's training ended."""

    rank: int
    step: int
    """Steps committed."""
    stopped: bool
    """Whether a `Request.STOP` ended it, not the last step."""
    layer_digests: tuple[tuple[int, str], ...]
    """(layer, sha256 over its weights and buffers) of every layer this rank holds."""
    checkpoint_error: str | None = None
    """Why the last checkpoint could not be written."""


class JobError(Exception):
    """An error that a user can mend: what was wrong, the number, the way out."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint to start from."""

    path: str
    step: int


@dataclass(frozen=True, kw_only=True)
class DamagedCheckpoint:
    """What a rank found wrong with a checkpoint."""

    path: str
    file: str
    problem: str
