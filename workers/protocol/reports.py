"""Messages from ranks to the controller. Dataclasses, no logic, no torch: any process can read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.course import Leg
from planner.freezing import FreezePlan
from planner.shards import Piece
from workers.protocol.carried import Carried


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step that all have committed, sent by the first rank.

    After a failure every surviving rank sends the newest ones again, as the first rank may be gone with its
    last reports. The first report to arrive for each generation and step counts.
    """

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
    """Seconds from the previous commit to this one."""
    bubble: float
    """Share of the step in which the ranks did not compute, mean over ranks; in [0, 1]."""
    skipped: bool
    """The norm was not finite: the step was committed without an update."""
    gradient_energy: float = 0.0
    """Squared norm of the step's gradient, estimated as if nothing had been frozen."""
    effective_update: float = 1.0
    """Share of that energy that the step's freeze ratios let through: TimelyFreeze definition D.7."""
    committed_s: float = 0.0
    """When it was committed, in seconds since the Unix epoch. The report follows a little later, once all
    ranks have passed that commit."""
    samples_digest: str = ""
    """Digest of the samples that it used, as read: `workers.data.sampling.samples_digest`."""


@dataclass(frozen=True, kw_only=True)
class StandbyReport:
    """The standbys that one rank keeps are up to date, or a snapshot is complete: from `step` on, the layers that they
    copy can be lost. A rank that still builds layers for the next generation then reports once more, without copies,
    when these are there."""

    step: int
    rank: int
    """Its place."""
    layers: tuple[int, ...]
    bytes: int
    """Bytes fetched for them."""
    seconds: float
    """Seconds since the start of the generation; of a snapshot, since its own."""
    snapshot: bool = False
    """Whether it is of a snapshot. Each plan's first one is told of."""
    given_up: bool = False
    """Whether, instead, the rank keeps no copies of `layers` any longer: its host has no memory for them."""
    shards: tuple[Piece, ...] = ()
    """Shards of `layers` that it reports on; empty: all layers, whole."""
    built: bool = True
    """Whether all that the rank builds for the next generation is there too, or cannot be had."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces that it reports on."""
        return self.shards or tuple(map(Piece, self.layers))


@dataclass(frozen=True, kw_only=True)
class SwitchReport:
    """A rank follows another plan from the step after `step` on, in the same generation; every rank reports
    it."""

    step: int
    rank: int
    """Its place."""
    epoch: int
    """Epoch of the plan; `version` completes it."""
    version: int
    taken: tuple[int, ...]
    """Layers that it newly owns."""
    given: tuple[int, ...]
    """Layers that it no longer owns."""
    brought_bytes: int
    """Size of the copies that it received under the previous plan."""
    brought_s: float
    """Seconds from the start of the previous plan until the last of them had arrived and was up to date."""
    stall_s: float
    """Seconds that the switch stalled this rank."""
    switched_s: float
    """When the rank switched, in seconds since the Unix epoch."""


@dataclass(frozen=True, kw_only=True)
class CopiedAhead:
    """A rank without a place has up-to-date copies of the layers of its coming place, or will not have them."""

    rank: int
    """Its number."""
    epoch: int
    """Epoch of the controller; it and `change` are those of the `CopyAhead`."""
    change: int
    step: int
    """The newest commit that they have; 0 if none came."""
    layers: tuple[int, ...]
    bytes: int
    """Size of the layers."""
    seconds: float
    """Since the rank began."""
    error: str | None = None
    """Why there will be no copies: the layers are fetched once the ranks regroup."""


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """A fault was injected into a rank; the last report of the rank if it was killed."""

    rank: int
    """Its number."""
    fault: str
    """The fault in words."""
    step: int
    phase: str
    fired_s: float
    """Seconds since the Unix epoch."""
    file: str = ""
    """The file that was damaged, if any."""


@dataclass(frozen=True, kw_only=True)
class NoticeReport:
    """A rank received notice that it or its node is leaving: `workers.notices`."""

    rank: int
    """Its number."""
    source: str
    """`file`, `sigterm`, `aws`, `gcp` or `azure`. A signal concerns only the rank, all others its node."""
    left_s: float | None
    """Seconds until it is gone; None if unknown."""
    text: str
    """The text of the notice."""
    node: str = ""
    """Id of the rank's node in the cluster; empty: the node on which the rank is known to run."""


@dataclass(frozen=True, kw_only=True)
class MemoryLow:
    """The memory that a rank's device has left fell below the reserve; sent at once."""

    rank: int
    """Its number."""
    place: int
    plan: tuple[int, int]
    """Epoch and version of the plan that it follows."""
    step: int
    """The step that it computes."""
    left_bytes: int
    """Memory left when the rank takes the most of a step."""
    reserve_bytes: int
    """Memory that should be left."""
    seen_s: float
    """Seconds since the Unix epoch."""


@dataclass(frozen=True, kw_only=True)
class WarningReport:
    """Something that the user should know; the rank continues."""

    rank: int
    """Its number."""
    text: str


@dataclass(frozen=True, kw_only=True)
class LayersChecked:
    """A rank compared layers with plain autograd, as its first step with them began or that of a further comparison."""

    rank: int
    """Its number."""
    layers: tuple[str, ...]
    """Their names."""
    whole: dict[str, str]
    """Layers among them whose gradients plain autograd forms -> why."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FreezeStarted:
    """All ranks adopted a freeze plan at a commit; sent by the first rank."""

    plan: FreezePlan
    """The plan, with its `start`."""


@dataclass(frozen=True, kw_only=True)
class PrefixFrozen:
    """The layers from the input up that have no backward pass are others from a step on; sent by the first rank, since
    every rank finds the same ones."""

    step: int
    """The first step that they hold for."""
    layers: int
    """Their number."""
    bound: float
    """The rule's count of layers between the first and the last, before it is rounded down; 0 without one."""
    norms: tuple[float, ...]
    """Per layer of the model, the norm of its gradient in the step before; 0 where none was formed."""
    names: tuple[str, ...]
    """The names of these layers."""
    tied: tuple[str, ...] = ()
    """Layers among them with a parameter that a layer still trained shares: that one is trained on."""
    leg: Leg | None = None
    """The leg of the batch's course that begins with the step, where the batch grows (`freeze.batch`)."""


@dataclass(frozen=True, kw_only=True)
class ActivationsKept:
    """Whether a rank keeps what its frozen layers make of samples; sent once it has tried one microbatch."""

    step: int
    rank: int
    layers: int
    """Frozen layers, from the input up."""
    held_out: bool = False
    """Whether of held-out samples."""
    why_not: str = ""
    """Why none are kept; empty if they are."""
    read_s: float
    """Time to read a microbatch's."""
    computed_s: float
    """Time to compute them."""


@dataclass(frozen=True, kw_only=True)
class ActivationsUsed:
    """Count of the microbatches of which a rank found kept what its frozen layers make, since its last such report."""

    step: int
    rank: int
    layers: int
    """Frozen layers, from the input up."""
    hits: int
    """Microbatches found."""
    partly: int
    """Microbatches found of fewer layers, which went through the others."""
    misses: int
    """Microbatches that went through all frozen layers."""
    bytes: int
    """Memory and disk that the node's files of the job take."""
    fetched: int = 0
    """Microbatches found of which ranks of other nodes had some or all."""
    fetch_s: float = 0.0
    """Time in which one comes from there; 0: none came."""


@dataclass(frozen=True, kw_only=True)
class FrozenAction:
    """Shares that a backward pass of one stage and microbatch skipped."""

    stage: int
    microbatch: int
    """Number of the microbatch in the replica."""
    planned: float
    """Expected share of weight-gradient time."""
    actual: float
    """Drawn share of weight-gradient time. Both shares are of measured time if the freeze plan in force gives
    it; else of the matrices' scalars."""
    parameters: float
    """Drawn share of all scalars. Its mean is the paper's average freeze ratio."""


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """Freezing of one rank in one step; sent from the first step on in which freezing is possible."""

    step: int
    rank: int
    """Its place."""
    actions: tuple[FrozenAction, ...]
    passes: int = 0
    """Backward passes of each layer in this step: the microbatches that the rank's pipeline executed."""
    counts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, for each of its parameters in name order the passes in which it was frozen)."""


@dataclass(frozen=True, kw_only=True)
class FrozenCounts:
    """Passes in which each parameter of one rank was frozen under its newest plan; sent when training ends.

    For an entire run, with all its plans and generations, see the `FreezeReport`s.
    """

    step: int
    rank: int
    passes: int
    """Backward passes per parameter: steps times microbatches of the replica."""
    counts: tuple[tuple[int, str, int], ...]
    """(layer, parameter, passes in which it was frozen)."""


@dataclass(frozen=True, kw_only=True)
class CurvatureReport:
    """One rank's part of a sample of how the gradient changes with the weights, between `step` and the last
    step before it that was not skipped; sent by the first pipeline's ranks, or where siblings share out states by all.

    Sums of squares in float64 over the rank's parameters, each tied one counted once. The gradients are means
    over the step's microbatches, before clipping.
    """

    step: int
    rank: int
    gradient_change_sq: float
    weight_change_sq: float
    """Squared distance of the weights at which the two gradients were taken."""
    gradient_sq: float
    """Squared norm of the gradient of `step`."""


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """A validation of the weights after `step`; sent, and resent after a failure, like a `StepReport`."""

    step: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Metric -> value; those that the model's task has."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """A checkpoint was completed, or failed and was dropped (earlier ones stay)."""

    step: int
    path: str
    bytes: int
    """Written for it: without files that it shares with checkpoints before it."""
    seconds: float
    """Time that the slowest rank took to write."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rescued:
    """The ranks wrote a checkpoint because the cluster's head is lost; sent by the first rank."""

    step: int
    lost_s: float
    """When the head was found lost, in seconds since the Unix epoch."""
    ends_s: float
    """When Ray ends the job's processes unless the head comes back, likewise."""
    seconds: float
    """Seconds for which the ranks stood still."""
    error: str | None = None
    """Why it could not be written."""


@dataclass(frozen=True, kw_only=True)
class ActionSpan:
    """One action as it ran."""

    action: str
    """Its token, e.g. `2F0`."""
    start_s: float
    """When it started, after its input had arrived; seconds since the previous commit."""
    end_s: float


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """Timeline of one rank's actions in one step."""

    step: int
    rank: int
    step_s: float
    spans: tuple[ActionSpan, ...]
    memory_bytes: int
    """Device memory that the rank takes: the peak of its tensors on a GPU, else its process's resident memory."""
    energies: tuple[float, ...] = ()
    """Per layer, the squared norm of its gradient, 0 where it is frozen as a whole; told by the first place in steps
    that form all others."""


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
    | PrefixFrozen
    | ActivationsKept
    | ActivationsUsed
    | FreezeReport
    | FrozenCounts
    | CurvatureReport
    | StandbyReport
    | SwitchReport
    | CopiedAhead
    | FaultReport
    | NoticeReport
    | MemoryLow
    | LayersChecked
    | Rescued
    | WarningReport
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a rank's training."""

    rank: int
    step: int
    """Steps committed."""
    stopped: bool
    """Whether a `Request.STOP` ended it rather than the last step."""
    reached: str = ""
    """The metric with its value that reached `job.stop_at` and ended it, as in `accuracy 0.9712`."""
    plateau: str = ""
    """The best value of what did not get better for as long as `job.patience`, which ended it, in words."""
    layer_digests: tuple[tuple[int, str], ...]
    """(layer, sha256 over its weights and buffers) of every layer that this rank holds."""
    checkpoint_error: str | None = None
    """Why the last checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Parted:
    """A rank left its generation at a commit that carried a `Request.REGROUP`, or that thawed too much for its plan."""

    rank: int
    step: int
    """Steps committed."""
    thawed: bool = False
    """Whether the next step trains layers that its plan has no backward pass for."""


@dataclass(frozen=True, kw_only=True)
class Working:
    """The action that a rank is computing."""

    action: str
    """Its token, e.g. `2F0`."""
    for_s: float
    """Seconds that it has been computing; waiting for other ranks does not count."""
    starved_s: float = 0.0
    """Seconds of that in which its threads waited for a processor, as far as known."""


@dataclass(frozen=True, kw_only=True)
class SnapshotHeld:
    """Pieces that one rank has of the snapshot of `step`."""

    step: int
    pieces: tuple[Piece, ...]
    """Layers, or shards of them."""
    carried: Carried | None = None
    """State besides layers that the step after `step` follows, where the rank knows it."""


@dataclass(frozen=True, kw_only=True)
class RankPosition:
    """The state of a rank between two generations."""

    rank: int
    step: int
    """Committed steps whose updates its layers have."""
    vector_sha256: str | None = None
    """Digest of all ranks' records of the commit of `step`, if it has them: `workers.control.records_digest`."""
    undecided: int | None = None
    """The step whose commit it reached without learning the outcome; it keeps the gradients until that is
    finished."""
    began: int = 0
    """The newest step that it began in its last generation. If it is not committed, it was in flight."""
    holds: tuple[Piece, ...] = ()
    """Layers, or shards of them, whose state of `step` is complete here, as owner or standby. If undecided, it can roll
    all of them forward."""
    weights: tuple[Piece, ...] = ()
    """Layers, or shards of them, of which only the weights of `step` are here, where the job salvages them: their
    source was lost before the moments had arrived, or they are a sibling's, with which this rank computes. If
    undecided, it can roll none forward."""
    freeze_plans: tuple[FreezePlan, ...] = ()
    """The adopted freeze plans, with their starts."""
    carried: Carried | None = None
    """State besides layers that the step after `step` follows, where the rank knows it."""
    snapshots: tuple[SnapshotHeld, ...] = ()
    """Newest first. They stay offered from whatever step the rank continues."""
    host: str = ""
    port: int = 0
    """Where its state server listens."""
