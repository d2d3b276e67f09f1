"""The states of a job, for the transitions of `machine.py`; `stimuli.py` and `effects.py` belong to them.

Frozen values, each with only its own payload. No transition is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.lifecycle.migration import Migration, RequestedMove
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.stimuli import RankLost
from planner.failure_domains import domain_name
from planner.freezing import FreezePlan
from planner.ir import Schedule
from planner.plan import Plan
from planner.search.alternatives import Alternative
from workers.config import ElasticConfig
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import Outcome, RankPosition, StepReport


@dataclass(frozen=True, kw_only=True)
class Order:
    """The job as ordered; it does not change while the job lives."""

    job: str
    epoch: int
    """Incarnation of the controller."""
    generation: int
    """Number of the first generation of ranks; those before it were of earlier controllers."""
    plan: Plan
    """The first plan."""
    schedule: Schedule
    """The schedule that the plan expands to."""
    checkpoints: tuple[CheckpointRef, ...]
    """To start from, newest first; the next is tried if one is damaged. Empty: from initial weights."""
    timeout_s: float
    """Time limit for a collective."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    alternatives: tuple[Alternative, ...] = ()
    """Candidates that the plan was chosen from."""
    freezing: FreezeHistory = field(default_factory=FreezeHistory)
    """Measurements and decisions of earlier runs of the job, or of the one that is replayed."""
    packs: bool = False
    """Whether the layout of the pipelines follows the layers that are frozen as a whole (`freeze.pack`)."""
    earlier: JobData | None = None
    """Job that an earlier controller of the same run left, if one did: its ranks may be training."""

    @property
    def wanted(self) -> int:
        """Number of ranks that the job is to have."""
        return self.plan.world_size


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """Target size of a job, in ranks."""

    places: int
    """Ranks with a place, of all pipelines together."""
    spares: int
    pipelines: int = 0
    """Pipelines that these are to form, as requested; 0: as many as the planner chooses."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Ranks of a job, and their places."""

    members: tuple[int, ...] = ()
    """Ranks of the newest generation that trained, by place."""
    tried: frozenset[int] = frozenset()
    """Ranks that loaded layers for a generation that has not trained yet, or never did."""
    alive: frozenset[int] = frozenset()
    """Ranks that are up and have opened model and data: members, spares, new and draining ones."""
    starting: frozenset[int] = frozenset()
    """Ranks that were started and are not up yet."""
    going: frozenset[int] = frozenset()
    """Draining ranks: they send what they hold and take no place."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node id of each rank."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """The address of each rank."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Node id -> the node's zone; empty if it is unknown."""
    hurried: frozenset[int] = frozenset()
    """Draining ranks whose time is running out: nothing is copied ahead any more."""
    next_rank: int = 0
    """The lowest number that no rank has had."""
    changes: int = 0
    """Number of planned changes so far."""
    size: TargetSize | None = None
    """The size that a command requested last; None: as the order says."""

    @property
    def idle(self) -> frozenset[int]:
        """Ranks that are up and have no place."""
        return self.alive - frozenset(self.members) - self.going

    def domain(self, rank: int) -> str:
        """The failure domain of `rank`."""
        node = self.nodes.get(rank, "")
        return domain_name(node, self.zones.get(node, ""))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a job: its plan, generations, steps and the checkpoints to go back to."""

    plan: Plan
    """The plan that the newest generation follows."""
    schedule: Schedule
    prepared: tuple[Plan, Schedule] | None = None
    """A plan of the previous controller that the ranks may still switch to."""
    generation: int = 0
    """Number of the newest generation."""
    trained: bool = False
    """Whether any generation has trained."""
    version: int = 0
    """Version of the newest plan of this controller."""
    step: int = 0
    """The last step that was reported; before the first report, the step to start from."""
    early: tuple[StepReport, ...] = ()
    """Reports of steps that came before those of their predecessors."""
    since: int = 0
    """The last generation that went back to a checkpoint: step reports of earlier ones no longer count."""
    step_s: float = 0.0
    """Time of the last reported step."""
    began: int = 0
    """The step at which the newest generation began to train."""
    validated: int = 0
    """The last step with a reported validation."""
    prefix_told: int = 0
    """The first step of the newest frozen prefix that was reported."""
    frozen: int = 0
    """Layers that are frozen as a whole by it."""
    keeps: bool = False
    """Whether a rank keeps what frozen layers make of samples."""
    packed_for: int = 0
    """The first step of the frozen prefix that the plan was made for, or another layout was weighed for in vain."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    freeze: tuple[FreezePlan, ...] = ()
    """Freeze plans with known starts."""
    round: int = 0
    """Counts the attempts to form a generation: an answer to an earlier one's effect is stale."""
    failures: int = 0
    """Number of failures with no step committed beyond `failed_at`. A pause keeps it."""
    failed_at: int = -1
    pauses: int = 0
    """Number of times that the job has waited for capacity."""
    paused: bool = False
    """From a pause until a generation trains again."""
    out_of_patience: bool = False
    """The pause has lasted for `elastic.wait_s`."""
    interrupted: bool = False
    """A step was in flight when the pause began."""
    halted: bool = False
    """An earlier controller left the job paused on request."""


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A requested number of places under way."""

    id: str
    """Id of the command."""
    before: TargetSize
    """The size that the job keeps if the ranks that it lacks do not come."""


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A requested drain under way."""

    id: str
    """Id of the command."""
    node: str
    ranks: frozenset[int]
    """The job's ranks on the node."""


@dataclass(frozen=True, kw_only=True)
class PlannedChange:
    """A change of ranks under way for which layers are copied ahead, while the generation trains."""

    number: int
    """Counts them."""
    cause: str
    """Why the ranks will regroup."""
    lineup: tuple[int, ...]
    """The ranks of the coming generation, by place."""
    prefix: int = 0
    """The first step of the frozen prefix that the next plan counts on."""
    frozen: int = 0
    """Layers that are frozen as a whole by it."""
    planning: bool = False
    """Whether the next plan was requested; a move of layers under way is finished before."""
    plan: Plan | None = None
    """The coming generation's."""
    schedule: Schedule | None = None
    copying: Plan | None = None
    """The plan with the copies, as it was issued."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """Place of a rank that follows it -> the step after which it does."""
    waiting: frozenset[int] = frozenset()
    """Places whose copies are not up to date yet."""
    coming: frozenset[int] = frozenset()
    """Ranks without a place now whose copies are not up to date yet."""
    there: frozenset[int] = frozenset()
    """Ranks without a place now whose copies are up to date."""


@dataclass(frozen=True, kw_only=True)
class LayersAhead:
    """Layers that ranks have copied and built for a coming generation, and were not told to drop."""

    ranks: frozenset[int] = frozenset()
    """Members that build, and ranks without a place that copy and build."""
    before: Plan | None = None
    """The plan that members followed before the first one with copies; None: they were given none."""


@dataclass(frozen=True, kw_only=True)
class Intents:
    """Requests and proposals that the job has not carried out yet."""

    asked: str | None = None
    """Why the ranks were asked to regroup at their next commit."""
    proposed: FreezePlan | None = None
    """A freeze plan that the ranks have not taken up yet."""
    migration: Migration | None = None
    """A move of layers under way."""
    moves: tuple[RequestedMove, ...] = ()
    """Moves that begin, one after the other, once the one under way is over."""
    change: PlannedChange | None = None
    """A change of ranks that is being prepared, or for which the ranks were asked to regroup."""
    ahead: LayersAhead = LayersAhead()
    """Layers that ranks hold for that change, or for one that it has replaced."""
    scaling: Resize | None = None
    """A command for another number of places, which the job does not have yet."""
    leaving: tuple[Leaving, ...] = ()
    """Requested drains of nodes that still have ranks."""
    stopping: bool = False
    """A stop was requested; the next generation gets it again if this one fails first."""
    save_after: int | None = None
    """A checkpoint later than this step was requested and is still to come; each new generation requests it again."""
    pausing: bool = False
    """All ranks were asked to end as for a stop; then the job pauses, or waits for other ranks."""
    halting: bool = False
    """A pause was requested; each new generation gets the request until the job has paused."""


@dataclass(frozen=True, kw_only=True)
class JobData:
    """Data of a job, carried from state to state."""

    membership: Membership
    progress: Progress
    intents: Intents = field(default_factory=Intents)


@dataclass(frozen=True)
class Draft:
    """A generation that is about to form."""

    recovery_plan: RecoveryPlan
    plan: Plan
    schedule: Schedule

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks by place."""
        return self.recovery_plan.lineup[: self.plan.world_size]


@dataclass(frozen=True)
class Pending:
    """Accepted; the cluster has no request yet."""


@dataclass(frozen=True)
class JobPlacing:
    """Resources are being reserved, one placement group per rank."""

    job: JobData


@dataclass(frozen=True)
class Preparing:
    """Rank processes start and open model and data."""

    job: JobData


@dataclass(frozen=True)
class Reclaiming:
    """A controller took over: it looks for the ranks of the previous one."""

    job: JobData
    waiting: frozenset[int]
    losses: tuple[RankLost, ...] = ()
    """Ranks that are gone."""


@dataclass(frozen=True)
class Assessing:
    """A generation has ended: every living rank reports its position."""

    job: JobData
    waiting: frozenset[int]
    positions: tuple[RankPosition, ...] = ()
    troubles: tuple[RankLost, ...] = ()
    """Failures, in order of arrival."""


@dataclass(frozen=True)
class FinishingCommit:
    """The ranks finish the commit at which the generation ended."""

    job: JobData
    recovery_plan: RecoveryPlan
    waiting: frozenset[int]


@dataclass(frozen=True)
class Planning:
    """The planner makes a plan for the ranks that continue."""

    job: JobData
    recovery_plan: RecoveryPlan


@dataclass(frozen=True)
class Loading:
    """Each rank loads its layers: its own copies, those of other ranks, or a checkpoint's."""

    job: JobData
    draft: Draft
    waiting: frozenset[int]
    damage: tuple[DamagedCheckpoint, ...] = ()


@dataclass(frozen=True)
class Hosting:
    """The rank at place 0 opens the store over which the group forms."""

    job: JobData
    draft: Draft


@dataclass(frozen=True)
class Joining:
    """The ranks form their process group."""

    job: JobData
    draft: Draft
    generation: Generation
    waiting: frozenset[int]


@dataclass(frozen=True)
class Training:
    """Steps are committed. The controller only listens."""

    job: JobData
    waiting: frozenset[int]
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class Stopping:
    """A stop was requested; the ranks end at their next commit."""

    job: JobData
    waiting: frozenset[int]
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """Too few ranks are left; they keep their layers until there are more."""

    job: JobData
    reason: str
    step: int
    """Steps committed."""
    saving: int | None = None
    """The step of which the ranks are writing a checkpoint."""


@dataclass(frozen=True)
class JobPaused:
    """A pause was requested: the job has a checkpoint and no ranks, and waits for a request to go on."""

    job: JobData
    step: int
    """Steps committed; the checkpoint has this step."""


@dataclass(frozen=True)
class Saving:
    """The job ends once what its ranks hold is in a checkpoint."""

    job: JobData
    step: int
    reason: str
    """Why it ends; empty: a stop was requested."""


@dataclass(frozen=True)
class Closing:
    """The end is known; ranks and reservations are being given back."""

    end: JobFinished | JobFailed


@dataclass(frozen=True)
class JobFinished:
    """Done: the last step is committed, or the job has stopped on request."""

    step: int
    stopped: bool
    state_sha256: str | None
    """None: no step was trained in this run."""
    reached: str = ""
    """The metric with its value that reached `job.stop_at`."""
    plateau: str = ""
    """The best value of what did not get better for as long as `job.patience`, in words."""


@dataclass(frozen=True)
class JobFailed:
    """The job failed or was aborted."""

    reason: str
    user_error: bool


Regrouping = Assessing | FinishingCommit | Planning | Loading | Hosting | Joining
"""States on the way to a generation."""
Live = Preparing | Reclaiming | Regrouping | Training | Stopping | Waiting | JobPaused | Saving
"""States in which there are ranks, or were before a pause."""
State = Pending | JobPlacing | Live | Closing | JobFinished | JobFailed


def in_words(state: State) -> str:
    """Adjective for a job in `state`, as messages use it: "training", "failed"."""
    return type(state).__name__.removeprefix("Job").lower()


Assessed = Assessing | FinishingCommit | Planning | Loading | Waiting | Saving | Closing
"""Assessing; or what the assessment leads to, at once if no rank has to be asked, or none any more."""

Same = TypeVar("Same", bound=State)
"""The present state, in a transition that may be another one's too; likewise the following."""
Own = TypeVar("Own", bound=JobPlacing | Live)
Trains = TypeVar("Trains", bound=Training | Stopping)
