"""The messages between ranks and controller. Dataclasses, no logic, no torch: any process can read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.freezing import FreezePlan
from planner.ir import Schedule
from planner.plan import Plan


class Request(StrEnum):
    """What the controller drops into a rank's mailbox. It rides in the next commit vector, so that all ranks
    act on it at the same commit; one rank's mailbox is enough."""

    CHECKPOINT = "checkpoint"
    """Write a checkpoint of the step being committed, go on."""
    STOP = "stop"
    """End after the step being committed, with a checkpoint."""
    REGROUP = "regroup"
    """Leave the generation after the step being committed: another one is to be formed."""


class Part(StrEnum):
    """How much of a layer's state."""

    ALL = "all"
    WEIGHTS = "weights"
    """Weights and buffers: what the layer computes with."""
    MOMENTS = "moments"
    """The rest: what the optimizer and the freezing have gathered."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership of the process group."""

    number: int
    epoch: int
    """Incarnation of the controller that formed it."""
    members: tuple[int, ...]
    """Ranks by place. A rank's number is its process's, and never used again; its place, from 0, is what it is in this
    generation: pipeline * P + pipeline rank."""
    store_host: str
    store_port: int
    timeout_s: float
    """How long a collective or a receive may wait."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One settled step, sent by the first rank. After a loss every rank that is left sends the newest ones again, as
    the first may be gone and its last words with it: of each generation and step the first one to come counts."""

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
    gradient_energy: float = 0.0
    """Squared norm of the step's gradient, estimated as if nothing had been frozen."""
    effective_update: float = 1.0
    """Share of that energy which the step's freeze ratios let through: TimelyFreeze definition D.7."""
    committed_s: float = 0.0
    """When it was committed, in seconds since the Unix epoch: it is reported once it is settled, a little later."""
    samples_digest: str = ""
    """Of the samples that it used, as read: `workers.data.sampling.samples_digest`."""


@dataclass(frozen=True, kw_only=True)
class StandbyReport:
    """The standbys that one rank keeps are current: whatever they stand in for can be lost from `step` on."""

    step: int
    rank: int
    """Its place."""
    layers: tuple[int, ...]
    bytes: int
    """Fetched for them."""
    seconds: float
    """From the beginning of the generation."""


@dataclass(frozen=True, kw_only=True)
class SwitchReport:
    """A rank follows another plan from the step after `step` on, in the same generation; every rank tells it."""

    step: int
    rank: int
    """Its place."""
    epoch: int
    """With `version`, of the plan."""
    version: int
    taken: tuple[int, ...]
    """Layers that it owns now and did not before."""
    given: tuple[int, ...]
    """Layers that it owned before and does not now."""
    brought_bytes: int
    """Size of the copies that came to it under the plan before."""
    brought_s: float
    """From the beginning of that plan until the last of them had come and was up to date."""
    stall_s: float
    """How long this rank stood still for it."""
    switched_s: float
    """When it did it, in seconds since the Unix epoch."""


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """A fault was injected into a rank; the last report of the rank if it was killed."""

    rank: int
    """Its number."""
    fault: str
    """In words."""
    step: int
    phase: str
    fired_s: float
    """Seconds since the Unix epoch."""
    file: str = ""
    """The file that was damaged, if any."""


@dataclass(frozen=True, kw_only=True)
class NoticeReport:
    """A rank received notice that it or its node is to go: `workers.notices`."""

    rank: int
    """Its number."""
    source: str
    """`file`, `sigterm`, `aws`, `gcp` or `azure`. A signal speaks for the rank alone, all others for its node."""
    left_s: float | None
    """Seconds until it is gone, as far as is known."""
    text: str
    """What was said."""
    node: str = ""
    """The rank's, by its id in the cluster; empty: where the rank is known to live."""


@dataclass(frozen=True, kw_only=True)
class WarningReport:
    """Something that a person should know; the rank goes on."""

    rank: int
    """Its number."""
    text: str


@dataclass(frozen=True, kw_only=True)
class FreezeStarted:
    """All ranks took up a freeze plan at a commit; sent by the first rank."""

    plan: FreezePlan
    """With its `start`."""


@dataclass(frozen=True, kw_only=True)
class FrozenAction:
    """What a backward pass of one stage and microbatch left out."""

    stage: int
    microbatch: int
    """Of the replica."""
    planned: float
    """Expected share of weight-gradient time."""
    actual: float
    """Drawn share of it. Both are of measured time where the freeze plan in force says what that is; else the matrices'
    scalars stand for it."""
    parameters: float
    """Drawn share of all scalars: the paper's average freeze ratio is its mean."""


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """What one rank froze in one step; sent from the first step on in which anything may be frozen."""

    step: int
    rank: int
    """Its place."""
    actions: tuple[FrozenAction, ...]
    passes: int = 0
    """Backward passes of each layer in this step: microbatches that the rank's pipeline executed."""
    counts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, of each of its parameters in name order the passes in which it was frozen)."""


@dataclass(frozen=True, kw_only=True)
class FrozenCounts:
    """How often each parameter of one rank was frozen since it followed its newest plan; sent when training ends. Of a
    whole run, with all its plans and generations, the `FreezeReport`s tell."""

    step: int
    rank: int
    passes: int
    """Backward passes per parameter: steps times microbatches of the replica."""
    counts: tuple[tuple[int, str, int], ...]
    """(layer, parameter, passes in which it was frozen)."""


@dataclass(frozen=True, kw_only=True)
class CurvatureReport:
    """One rank's part of a sample of how the gradient changes with the weights, between `step` and the step before it
    that was not skipped; sent by the first replica's ranks. Sums of squares in float64 over the rank's parameters, a
    tied one counted once; the gradients are means over the step's microbatches, before clipping."""

    step: int
    rank: int
    gradient_change_sq: float
    weight_change_sq: float
    """Between the weights at which the two gradients were taken."""
    gradient_sq: float
    """Of the gradient of `step`."""


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Of the weights after `step`; sent, and sent again after a loss, like a `StepReport`."""

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


Report = (
    StepReport
    | ValidationReport
    | CheckpointReport
    | TimelineReport
    | SampleReport
    | FreezeStarted
    | FreezeReport
    | FrozenCounts
    | CurvatureReport
    | StandbyReport
    | SwitchReport
    | FaultReport
    | NoticeReport
    | WarningReport
)


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


@dataclass(frozen=True, kw_only=True)
class Parted:
    """A rank left its generation at a commit that carried a `Request.REGROUP`."""

    rank: int
    step: int
    """Steps committed."""


@dataclass(frozen=True, kw_only=True)
class Working:
    """The action that a rank computes just now."""

    action: str
    """Its token, e.g. `2F0`."""
    for_s: float
    """How long it has computed; waiting for other ranks does not count."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a rank stands between two generations."""

    rank: int
    step: int
    """Steps committed whose updates its layers have."""
    vector: tuple[bytes, ...] | None = None
    """All ranks' records of the commit of `step`, if that was in its last generation."""
    undecided: int | None = None
    """The step to whose commit it came without learning the outcome; it keeps the gradients until it is settled."""
    began: int = 0
    """The newest step that it began in its last generation; it was in flight if it is not committed."""
    holds: tuple[int, ...] = ()
    """Layers whose state of `step` is whole here, owned or stood by. Undecided, it can roll all of them forward."""
    weights: tuple[int, ...] = ()
    """Layers of which no more than the weights of `step` are here: who gave them was lost before the moments had
    come."""
    freeze_plans: tuple[FreezePlan, ...] = ()
    """Those taken up, with their starts."""
    host: str = ""
    port: int = 0
    """Where its state server listens."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The outcome of the commit in which a generation ended; the same for all its surviving ranks."""

    step: int
    """The step at which all stand from here on."""
    vector: tuple[bytes, ...] | None = None
    """All ranks' records of the commit of `step`, for ranks undecided about it. None: undecided ranks roll back."""
    reported: int
    """The newest step reported to the controller. Later steps are reported again: the first rank may have died before
    it reported them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a layer's state can be fetched."""

    layer: int
    rank: int
    host: str
    port: int
    part: Part = Part.ALL
    """How much of it there is."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a rank is to be in its next generation.

    The state of each layer that it owns by `plan` is that of `start`, if given. Else it is what the rank holds, what it
    fetches from `sources`, or, before the first step, the initial values.
    """

    place: int
    """pipeline * P + pipeline rank."""
    plan: Plan
    schedule: Schedule
    step: int = 0
    """Steps committed where the generation begins."""
    start: CheckpointRef | None = None
    """The checkpoint of `step` that all begin with."""
    sources: tuple[Source, ...] = ()
    moments: CheckpointRef | None = None
    """Where those layers' moments come from of which the sources have only the weights; None: initial values."""
    freeze: tuple[FreezePlan, ...] = ()
    """Freeze plans with known starts; what is prepared later is taken up only after the last of them."""

    @property
    def salvaged(self) -> frozenset[int]:
        """Layers whose moments are lost."""
        return frozenset(source.layer for source in self.sources if source.part is Part.WEIGHTS)


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
