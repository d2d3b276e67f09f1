"""The types of events, one JSON line each in `events.jsonl`, read back as the same types. Decides nothing.

What only the orchestrator knows is defined here, each type with the level and the sentence that people read of it; the
ranks' reports are types of workers, with level and sentence in `reports.py`. One more event is its class here, a line
of `Event`, and an example in `tests/orchestrator/events/test_events.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import TypeAdapter

from orchestrator.events.earlier_names import EARLIER_NAME_OF, EARLIER_NAMES
from orchestrator.events.level import Level
from orchestrator.events.rehearsed import Disturbed, Rehearsed
from orchestrator.events.reports import report_level, report_sentence
from orchestrator.quantities import operations, seconds, size
from planner.adapt.past import Past
from planner.freezing import Budget, FreezeOverrides, FreezePlan
from planner.plan import Plan
from planner.search.alternatives import Alternative
from planner.simulation.slow_links import SlowLink
from planner.wording import counted, link_rate, named, shares_text
from workers.protocol.errors import DamagedCheckpoint, MemoryShortage
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import Outcome, Report

MOST_NAMED = 5
"""Names of one kind in a sentence; it counts the others."""


def command_words(name: str) -> str:
    """A command or request as the command line and the pages call it: a job is cancelled, with a checkpoint or now."""
    return {"stop": "cancel", "abort": "cancel now"}.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A controller started the job, or took it over."""

    job: str
    epoch: int
    """The controller's incarnation."""
    spec: dict[str, Any]
    """The resolved spec."""
    resume: bool
    """Whether the job continues from a checkpoint."""
    takeover: bool = False
    """The controller before this one was lost, and its ranks may be training."""
    train_samples: int = 0
    """Training samples; 0: unknown."""

    @property
    def level(self) -> Level:
        return "warning" if self.takeover else "note" if self.resume else "detail"

    @property
    def sentence(self) -> str:
        if self.takeover:
            return f"the controller was lost; another one took over, as epoch {self.epoch}"
        return "the job was resumed" if self.resume else f"job {self.job} starts, as epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class WeightsUnmatched:
    """The model and the files of weights that it begins with differ in some tensors, by their names there."""

    drawn: tuple[str, ...]
    """Tensors that the files lack."""
    left_over: tuple[str, ...]
    """Tensors that the model has not."""

    level: ClassVar[Level] = "note"

    @property
    def sentence(self) -> str:
        drawn = f"the files of weights lack {_named(self.drawn)}: drawn from the seed" if self.drawn else ""
        left = (
            f"the files of weights have {_named(self.left_over)}, which the model has not"
            if self.left_over
            else ""
        )
        return "; ".join(filter(None, (drawn, left)))


def _named(names: Sequence[str]) -> str:
    some = ", ".join(names[:MOST_NAMED])
    return some if len(names) <= MOST_NAMED else f"{some} and {len(names) - MOST_NAMED:,} more"


@dataclass(frozen=True, kw_only=True)
class FlopsCounted:
    """The floating-point operations of a sample were counted."""

    flops_per_sample: float
    """The operations of its forward and backward passes."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"a sample takes {operations(self.flops_per_sample)}"


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A plan was logged, before it is sent."""

    plan: Plan
    alternatives: tuple[Alternative, ...] = ()
    """The plans that it was chosen from, including itself; empty if there was no search."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        return f"plan {self.plan.epoch}.{self.plan.version}: {self.plan.reason}"


@dataclass(frozen=True, kw_only=True)
class Placing:
    """The cluster is asked for the resources of these ranks; `RankStarted` or `RankFailed` follows for each."""

    ranks: tuple[int, ...]

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        return f"the cluster is asked for {counted(len(self.ranks), 'rank')}: {named('rank', self.ranks)}"


@dataclass(frozen=True, kw_only=True)
class RankStarted:
    """A rank's process is up and has read its data."""

    rank: int
    node: str
    """Node id of the cluster."""
    host: str
    """Address of the node."""
    pid: int
    zone: str = ""
    """Zone of the node, by its labels; empty if unknown."""
    machine: str = ""
    """Its hardware and library, as far as they decide of the last digits of what it computes; empty: unknown."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} is up on {self.host}, process {self.pid}"


@dataclass(frozen=True, kw_only=True)
class Formed:
    """The ranks joined a process group and train from here."""

    generation: Generation
    start: CheckpointRef | None
    """The checkpoint they start from; None: initial weights, or the state that the ranks hold."""
    step: int
    """Steps committed where it begins."""
    snapshot: bool = False
    """Whether the ranks went back to that step, of which they hold a snapshot between them."""
    failures: int = 0
    """Number of failures with no step committed beyond `failed_at`."""
    failed_at: int = -1

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        members = named("rank", self.generation.members)
        return f"generation {self.generation.number}, {members}, trains from step {self.step} on"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A checkpoint was damaged and the one before it is tried."""

    rank: int
    damage: DamagedCheckpoint

    level: ClassVar[Level] = "warning"

    @property
    def sentence(self) -> str:
        damage = self.damage
        return f"a damaged checkpoint was passed over: {damage.path}, {damage.file}: {damage.problem}"


@dataclass(frozen=True, kw_only=True)
class Requested:
    """Someone requested something of the job."""

    request: str
    """`checkpoint`, `stop`, `abort`, `pause` or `resume`."""

    level: ClassVar[Level] = "note"

    @property
    def sentence(self) -> str:
        match self.request:
            case "stop":
                return "someone cancelled the job"
            case "abort":
                return "someone cancelled the job at once, without a checkpoint"
            case request:
                return f"someone asked the job to {request}"


@dataclass(frozen=True, kw_only=True)
class Commanded:
    """A command arrived from outside. Logged before anything is done for it."""

    id: str
    """Chosen by the sender: a command that arrives twice with one id is done once."""
    name: str
    """One of `orchestrator.commands.table.BY_LOG_NAME`."""
    arguments: dict[str, Any]
    by: str = ""
    """Who sent it and from where, such as `control from 127.0.0.1`; empty: not said."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        called, by = command_words(self.name), f", by {self.by}" if self.by else ""
        what = f"{called} {json.dumps(self.arguments)}" if self.arguments else called
        return f"{what}, id {self.id}{by}"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A command was decided."""

    id: str
    done: bool
    """Whether it was done; otherwise it was refused, or something else happened first."""
    step: int
    """Steps committed at that time."""
    text: str
    """In words: what was done, or why not."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"{'done' if self.done else 'not done'}: {self.text}, id {self.id}"


@dataclass(frozen=True, kw_only=True)
class PlannerStarted:
    """The planner's process is up."""

    life: int
    """Planners that the controller has started so far, this one included."""
    node: str
    """Node id of the cluster."""
    pid: int
    of: str = "freezing"
    """Its tasks when it started: `freezing`, `speeds` for moves away from slow ranks, or `freezing, speeds`."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"planner {self.life} for {self.of} is up on node {self.node[:12]}, process {self.pid}"


@dataclass(frozen=True, kw_only=True)
class FreezeSolved:
    """The freeze program was solved with the times of the monitoring phase. Logged before `plan` is sent."""

    plan: FreezePlan
    ratios: tuple[tuple[int, int, float], ...]
    """(stage, microbatch of the replica, share of weight-gradient time to freeze)."""
    unfrozen_s: float
    """Makespan of a window with nothing frozen."""
    solved_s: float
    """Makespan with these ratios."""
    all_frozen_s: float
    """Makespan with everything frozen."""
    outside_s: float
    """Time of a step outside its window: exchange, commit, update."""
    measured_unfrozen_s: float | None
    """Median step of the monitoring phase with nothing frozen; None if the times are those of the profile."""
    measured_all_frozen_s: float | None
    """The same with everything frozen."""
    kappa: float
    """Expected mean step with these ratios over step without: TimelyFreeze eq. 12."""
    mean_per_stage: tuple[float, ...]
    """Mean ratio over a stage's freezable actions."""
    duals: tuple[float, ...]
    """Per stage, seconds of makespan that one more unit of r_max would save."""
    critical: tuple[str, ...]
    """Tokens of the actions on the solved window's critical path."""
    solve_s: float
    spread: float | None = None
    """Mean step over a step in which every draw takes its expectation; None if no profile says how draws spread."""
    p_eff: float | None = None
    """Expected share of the gradient's energy that reaches the weights: TimelyFreeze definition D.7; None if nobody has
    measured the energy of layers."""
    progress: float | None = None
    """With r_max = auto: the expected share of a step's progress that is left, which under SGD is p_eff."""
    energies: tuple[float, ...] = ()
    """Per layer, the squared norm of its gradient that this rests on: the mean over the monitored steps that froze
    nothing."""
    confirmed: float = 1.0
    """Share of the saving with everything frozen that the monitored steps show; kappa counts with it."""

    @property
    def level(self) -> Level:
        return "note" if self.measured_unfrozen_s is None else "progress"

    @property
    def sentence(self) -> str:
        if self.measured_unfrozen_s is None:
            rest = (
                "the freeze ratios rest on the profile's times: the monitored steps did not time all actions"
            )
            return f"{rest}; {self.gain}"
        return f"freezing: {self.gain}"

    @property
    def gain(self) -> str:
        """The expected gain in words."""
        if self.progress is not None and not any(ratio for _, _, ratio in self.ratios):
            worth = f"nothing, which is worth more than any of it: a window takes {seconds(self.unfrozen_s)}"
            return worth + self._unconfirmed
        times = f"{seconds(self.unfrozen_s)} -> {seconds(self.solved_s)}"
        by = ", by the profile's times" if self.measured_unfrozen_s is None else ""
        return (
            f"expected compute per step: {times} ({seconds(self.all_frozen_s)} with everything frozen){by}"
            f"{self._unconfirmed}"
        )

    @property
    def _unconfirmed(self) -> str:
        if self.confirmed > 0.95:
            return ""
        share = f"{100 * self.confirmed:.0f} %"
        return (
            f"; monitored steps show {share} of what everything frozen would save, as where ranks share cores"
        )


@dataclass(frozen=True, kw_only=True)
class FreezeMeasured:
    """The gain and the cost of freezing by the steps so far, beside what was predicted. Told now and again while
    something is frozen."""

    step: int
    method: str
    kappa: float
    """Median step with full freezing over median step with none (TimelyFreeze eq. 12)."""
    predicted_kappa: float | None
    """None: nothing predicts it."""
    p_eff: float
    """Share of gradient energy that reached the weights in the steps with full freezing (definition D.8)."""
    predicted_p_eff: float | None
    progress: float | None
    """With r_max = auto: the predicted share of a step's progress that is left."""
    above_prefix: bool
    """Whether kappa and what is predicted compare with steps that freeze a prefix alone."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        without = "with the prefix alone" if self.above_prefix else "without freezing"
        time = f"a step takes {self.kappa:.2f} of its time {without}{_predicted(self.predicted_kappa)}"
        energy = (
            f"{self.p_eff:.2f} of the gradient's energy reaches the weights{_predicted(self.predicted_p_eff)}"
        )
        left = "" if self.progress is None else f"; {self.progress:.2f} of its progress is left, as predicted"
        return f"freezing, as measured up to step {self.step}: {time}, and {energy}{left}"


def _predicted(number: float | None) -> str:
    return "" if number is None else f" (predicted {number:.2f})"


@dataclass(frozen=True, kw_only=True)
class FreezeChanged:
    """Someone changed the freeze settings. Logged before `plan` is sent; all ranks follow it from one commit on, which
    `FreezeStarted` names."""

    from_step: int
    """The first step that may follow it."""
    method: str
    r_max: Budget
    by: str
    """Who sent the request and from where; empty: not said."""
    plan: FreezePlan
    """Carries the settings; its ratios are zeros unless the freeze program was solved again."""
    id: str = ""
    """Id of the command; empty: none requested it."""
    reason: str = ""
    """Why the job changed them itself; empty: someone else did."""

    level: ClassVar[Level] = "note"

    @property
    def sentence(self) -> str:
        by = "the job" if self.reason else self.by or "someone"
        why = f": {self.reason}" if self.reason else ""
        if self.method == "none":
            return f"{by} turned freezing off{why}"
        control = self.plan.control or FreezeOverrides(method=self.method, r_max=self.r_max)
        return f"{by} set the freeze method to {control.named}{why}"


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A new generation trains in place of an earlier one. Times are measured by the controller."""

    generation: int
    cause: str
    """`loss`, `drain`, `join`, `capacity` (after a pause), `move`, `scale`, `pack` (layers were frozen or thawed),
    `memory` (a rank ran out of it), or `retry` (a step failed and no rank was lost)."""
    reason: str
    """Reason for the decision, in words with its numbers."""
    lost: tuple[int, ...]
    """Ranks that failed or were released."""
    joined: tuple[int, ...]
    """New ranks."""
    step: int
    """Steps committed where it begins."""
    rerun: int
    """Interrupted steps that are run again: at most 1, without `steps_lost`."""
    steps_lost: int
    """Committed steps that are run again because no checkpoint has them."""
    detect_s: float
    """From the first sign of failure until it was known which ranks are left. The first sign of a hang is the rank's
    last answer, or the beginning of the action in which it hung."""
    settle_s: float
    """Until all ranks are at one step: the interrupted commit is finished."""
    plan_s: float
    move_s: float
    """Until every rank has its layers."""
    resume_s: float
    """Until the group has formed and trains."""
    fetched: int | None = None
    """Layers that ranks lacked, and fetched from others in that time; None: they came from a checkpoint, or nobody
    counted."""
    silent_s: float = 0.0
    """The part of `detect_s` in which nobody knew of the failure: a lost rank stood still."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        took_s = self.detect_s + self.settle_s + self.plan_s + self.move_s + self.resume_s
        return f"training goes on after step {self.step}, {seconds(took_s)} later: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """Layers have changed ranks while the job trained, or pipelines have other shares of its steps."""

    version: int
    """Version of the plan that says so."""
    layers: tuple[int, ...]
    source: tuple[int, ...]
    """Per layer, the pipeline rank that had it."""
    target: tuple[int, ...]
    """Per layer, the pipeline rank that has it now."""
    mode: str
    """`live`, `deferred` or `stop`."""
    bytes: int | None
    """Bytes sent to the layers' new ranks; None if not counted."""
    seconds: float
    """From the request until all ranks followed the plan."""
    steps: int
    """Steps committed in that time."""
    stall_s: float
    """Longest time that a rank did not train."""
    step: int
    """Steps committed when the ranks followed the plan."""
    shares: tuple[int, ...] = ()
    """Microbatches of a step that each pipeline executes from now on, if they are uneven."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        still = f"{seconds(self.stall_s)} of standing still"
        if not self.layers:
            return f"a step now has {shares_text(self.shares)} ({self.mode}): {still}"
        has = "has" if len(self.layers) == 1 else "have"
        way = f"{seconds(self.seconds)} and {counted(self.steps, 'step')} on the way"
        return f"{named('layer', self.layers)} {has} moved ({self.mode}): {way}, {still}"


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """From now on the job is to have another number of ranks, as someone requested. The ranks follow at a commit."""

    ranks: int
    """Ranks of one pipeline."""
    spares: int
    places: int
    """Ranks with a place, of all pipelines together."""
    id: str = ""
    """Id of the command; empty: the job returns to its size from before a command that failed."""
    pipelines: int = 0
    """Pipelines that they are to form; 0: as many as the planner chooses."""

    @property
    def level(self) -> Level:
        return "note" if self.id else "warning"

    @property
    def sentence(self) -> str:
        pipelines = f"{counted(self.pipelines, 'pipeline')} with " if self.pipelines else ""
        each = "each" if self.pipelines else "in a pipeline"
        asked = f"{pipelines}{counted(self.ranks, 'rank')} {each} and {counted(self.spares, 'spare rank')}"
        if self.id:
            return f"someone asked for {asked}"
        return f"the ranks that someone asked for did not come: the job keeps {asked}"


@dataclass(frozen=True, kw_only=True)
class Dismissed:
    """Ranks without a place are released: the job has more of them than spares."""

    ranks: tuple[int, ...]

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"{named('rank', self.ranks)} released: the job needs no more spares"


@dataclass(frozen=True, kw_only=True)
class LayoutWeighed:
    """Another layout of the pipelines was weighed for the layers that are trained; if it pays, a `Regrouped` with the
    cause `pack` follows."""

    prefix: int
    """The first step that the frozen layers hold for."""
    pays: bool
    reason: str
    """The steps that it saves against its cost, in words with their numbers."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        verdict = "takes the place of this one" if self.pays else "does not pay"
        return f"another layout for the layers that are trained from step {self.prefix} on {verdict}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Paused:
    """The job's state is safe, and it waits: for capacity, or until someone resumes it."""

    reason: str
    step: int
    requested: bool = False
    """Whether someone requested it: then a checkpoint has the state, and the ranks are released."""
    failures: int = 0
    """Number of failures, as in `Formed`."""
    failed_at: int = -1

    @property
    def level(self) -> Level:
        return "progress" if self.requested else "warning"

    @property
    def sentence(self) -> str:
        if self.requested:
            return f"paused after step {self.step}: a checkpoint has it, and the ranks are given back"
        return f"waiting for capacity: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """A notice arrived that a node will go."""

    node: str
    """Node id of the cluster."""
    host: str
    source: str
    """`ray`, `sigterm`, `aws`, `gcp`, `azure`, `file`, or `request` for a command."""
    ranks: tuple[int, ...]
    """Ranks on the node."""
    left_s: float | None
    """Seconds until it is gone, if known."""
    id: str = ""
    """Id of the command; empty: none requested it."""

    level: ClassVar[Level] = "note"

    @property
    def sentence(self) -> str:
        where = f" on {self.host}" if self.host else ""
        who = f"{named('rank', self.ranks)}{where}" if self.ranks else "a rank that is already gone"
        left = f", {seconds(self.left_s)} left" if self.left_s is not None else ""
        return f"{who} must leave ({self.source}{left})"


@dataclass(frozen=True, kw_only=True)
class Undrained:
    """A node that a command had drained may get ranks of the job again."""

    node: str
    """Node id of the cluster."""
    host: str
    id: str = ""
    """Id of the command that lifted the drain."""

    level: ClassVar[Level] = "note"

    @property
    def sentence(self) -> str:
        host = f" ({self.host})" if self.host else ""
        return f"the job may start ranks on node {self.node[:12]}{host} again"


@dataclass(frozen=True, kw_only=True)
class ProfileDoubted:
    """The first steps took another time than the profile that the plan was made with predicts."""

    key: str
    """Key of the profile."""
    profile_s: float | None
    """When it was measured, in seconds since the Unix epoch; None: unknown."""
    disturbed: str
    """Disturbance of its measurement, in words; empty: none is known."""
    predicted_s: float
    """A step, by the profile."""
    took_s: float
    """Median of the steps that were compared."""
    step: int
    """The last of them."""
    again: bool
    """Whether the next start measures again; a quiet, fresh profile would come out the same."""

    level: ClassVar[Level] = "warning"

    @property
    def sentence(self) -> str:
        took, predicted = seconds(self.took_s), seconds(self.predicted_s)
        text = f"the profile does not hold: steps take {took}, and {predicted} were predicted"
        if self.disturbed:
            text += f"; while it was measured, {self.disturbed}"
        if self.again:
            return f"{text}. The next start of the job measures again"
        return f"{text}. It was measured just before, and nothing is known that disturbed it"


@dataclass(frozen=True, kw_only=True)
class SpeedsChanged:
    """The planner's picture of the ranks' speeds changed."""

    step: int
    """Steps committed."""
    slowdowns: tuple[tuple[int, float], ...]
    """(rank, factor on the profile's times) of every rank with a place."""
    changes: tuple[str, ...]
    """Changes in words; empty: all ranks are known for the first time, or their speeds have drifted."""
    lasting_steps: int
    """Number of steps that a speed lasts, estimated from the job so far."""
    since: int
    """The step since which no speed has changed."""
    past: Past | None = None
    """History of the ranks' speeds so far; None in logs of versions that did not record it."""

    @property
    def level(self) -> Level:
        # Ranks that became faster are no reason to warn.
        slower = any(" slower " in change for change in self.changes)
        return "warning" if slower else "note" if self.changes else "progress"

    @property
    def sentence(self) -> str:
        if self.changes:
            return "; ".join(self.changes)
        rank, slowest = max(self.slowdowns, key=lambda entry: entry[1])
        return f"speeds are known: rank {rank}, the slowest, takes {slowest:.2f} times the profile's times"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Slowdown and surroundings of one rank."""

    rank: int
    """Its number."""
    slowdown: float
    """Slowdown measured in the newest step."""
    values: tuple[tuple[str, float], ...]
    """(name, value) of some features of `planner.features`; those that its machine cannot tell are missing."""
    waited_s: float | None = None
    """Time that its actions waited for data from other ranks, in the newest step; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Occasional sample of the ranks' surroundings: the planner sees more."""

    step: int
    """Steps committed."""
    ranks: tuple[Surroundings, ...]

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"surroundings of {counted(len(self.ranks), 'rank')} in step {self.step}"


@dataclass(frozen=True, kw_only=True)
class LayersTimed:
    """The layers' times are others than those that the planner has planned with."""

    step: int
    """Steps committed."""
    factors: tuple[tuple[float, float, float], ...]
    """Per layer, on the profile's forward, input gradient and weight gradient."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"times of {counted(len(self.factors), 'layer')} as of step {self.step}"


@dataclass(frozen=True, kw_only=True)
class LinksTimed:
    """The slow links are others than those that the planner has planned with."""

    step: int
    """Steps committed."""
    links: tuple[SlowLink, ...]
    """By rank, all that are slower than the profile's; empty: none is any more."""
    changes: tuple[str, ...] = ()
    """Changes in words; empty: links have drifted, or a slow one has not been measured for so long that its speed from
    before the job counts again."""

    @property
    def level(self) -> Level:
        return "warning" if self.changes else "progress"

    @property
    def sentence(self) -> str:
        if self.changes:
            return "; ".join(self.changes)
        if not self.links:
            return "no link is slower than before the job any more"
        slow = [
            f"rank {link.source} -> {link.target} {link_rate(link.bytes_per_s)}, {seconds(link.latency_s)}"
            for link in self.links
        ]
        return f"slow links: {'; '.join(slow)}"


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The planner decided whether another cut pays for the speeds that it knows."""

    step: int
    """Steps committed."""
    moves: bool
    """Whether the ranks are to follow it."""
    reason: str
    now_s: float
    """Predicted step with the present cut."""
    then_s: float
    """Predicted step with the best cut that was found."""
    cost_s: float
    """Training time that the move costs."""
    layers: tuple[int, ...]
    """Per stage, of that cut."""

    level: ClassVar[Level] = "progress"

    @property
    def sentence(self) -> str:
        return f"{self.verdict}: {self.reason}"

    @property
    def verdict(self) -> str:
        """Whether the plan changes for the ranks' speeds: layers move, or pipelines get other shares."""
        return "the plan changes" if self.moves else "the cut stays"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An allocation of a rank failed. The step is run again under a smaller plan."""

    rank: int
    place: int
    """Its place in the plan."""
    plan: tuple[int, int]
    """Epoch and version of the plan that was too large."""
    step: int
    """Steps committed."""
    shortage: MemoryShortage

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        lack, plan = self.shortage, f"{self.plan[0]}.{self.plan[1]}"
        known = [
            f"{size(count_bytes)} {what}"
            for count_bytes, what in (
                (lack.needed_bytes, "asked for"),
                (lack.free_bytes, "free"),
                (lack.held_bytes, "held by its tensors"),
            )
            if count_bytes is not None
        ]
        numbers = f" ({', '.join(known)})" if known else ""
        return (
            f"rank {self.rank} ran out of memory{numbers} under plan {plan}, after step {self.step}: the step is run"
            " again under a smaller plan"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryLimited:
    """Every later plan takes less of a rank's memory than its device has."""

    rank: int
    limit_bytes: int | None
    """The most that a plan may take, as the profile counts it. None: there is no profile, and all layers recompute that
    can."""
    reason: str
    step: int
    """Steps committed."""

    level: ClassVar[Level] = "warning"

    @property
    def sentence(self) -> str:
        if self.limit_bytes is None:
            limit = f"rank {self.rank} ran out of memory, and all layers recompute from now on"
        else:
            limit = f"plans take {self.limit_bytes:,} bytes of rank {self.rank} at most from now on"
        return f"{limit}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something that a person should know; the job goes on."""

    text: str

    level: ClassVar[Level] = "warning"

    @property
    def sentence(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """A rank that had stood still goes on."""

    rank: int
    seconds: float
    """From its last answer until the next one; or how long it computed one action."""
    reason: str = ""
    """Reasons for part of the standstill, in words; empty: none was seen."""
    action: str = ""
    """The action that it computed; empty: it did not answer."""

    level: ClassVar[Level] = "warning"

    @property
    def sentence(self) -> str:
        did = f"computed {self.action}" if self.action else "answered nothing"
        why = f" ({self.reason})" if self.reason else ""
        return f"rank {self.rank} {did} for {seconds(self.seconds)} and goes on{why}"


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """A rank's training ended as planned."""

    outcome: Outcome

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"the rank in place {self.outcome.rank} has ended at step {self.outcome.step}"


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """A rank died or raised."""

    rank: int
    error: str
    details: str = ""
    """A traceback, if the error alone does not say enough."""

    level: ClassVar[Level] = "error"

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The job is done: trained to its last step, or stopped."""

    step: int
    """Steps committed."""
    stopped: bool
    """Whether a request ended it rather than the last step."""
    state_sha256: str | None
    """Hash of all weights and buffers in layer order; None if this run trained no step."""
    reached: str = ""
    """The metric with its value that reached `job.stop_at` and ended it, as in `accuracy 0.9712`."""
    plateau: str = ""
    """The best value of what did not get better for as long as `job.patience`, which ended it, in words."""

    level: ClassVar[Level] = "detail"

    @property
    def why(self) -> str:
        """Reason, in words, why validations ended it: the metric that reached its target, or what got no better."""
        return self.reached or self.plateau

    @property
    def sentence(self) -> str:
        why = f", {self.why}" if self.why else ""
        return f"{'stopped' if self.stopped else 'done'} at step {self.step}{why}, state {self.state_sha256}"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job ended without a request."""

    reason: str
    user_error: bool
    """Whether the user can fix it: the spec, the data, the cluster."""

    level: ClassVar[Level] = "error"

    @property
    def sentence(self) -> str:
        return f"the job failed: {self.reason}"


Event = (
    Submitted
    | FlopsCounted
    | Issued
    | Placing
    | RankStarted
    | Formed
    | Skipped
    | Requested
    | Commanded
    | Answered
    | PlannerStarted
    | FreezeSolved
    | FreezeMeasured
    | FreezeChanged
    | Regrouped
    | Migrated
    | Scaled
    | Dismissed
    | LayoutWeighed
    | Paused
    | Noticed
    | Undrained
    | WeightsUnmatched
    | ProfileDoubted
    | SpeedsChanged
    | Sampled
    | LayersTimed
    | LinksTimed
    | Adapted
    | OutOfMemory
    | MemoryLimited
    | Warned
    | Stalled
    | RankEnded
    | RankFailed
    | Finished
    | Failed
    | Rehearsed
    | Disturbed
    | Report
)

KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
"""Name of a class, which its lines carry as `event` -> the class."""


def kind_called(name: str) -> str | None:
    """The kind called `name`, today or in logs of before; None: there is none."""
    kind = EARLIER_NAMES.get(name, name)
    return kind if kind in KINDS else None


def name_of_kind(fields: Mapping[str, Any]) -> Any:
    """Name of the kind in the fields of a line, for `kind_called`; logs of before have it as `kind` alone.

    Raises:
        KeyError: they have no name.
    """
    return fields["event"] if "event" in fields else fields["kind"]


def level_of(event: Event) -> Level:
    """The level of `event`."""
    return report_level(event) if isinstance(event, Report) else event.level


def sentence_of(event: Event) -> str:
    """`event` in words: begins with a small letter and ends without a full stop, unless it quotes."""
    return report_sentence(event) if isinstance(event, Report) else event.sentence


PREVIOUS = "previous_sha256"
"""Key of a line under which it carries the hash of the line before it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the log."""

    time_s: float
    """Seconds since the Unix epoch."""
    event: Event

    @property
    def kind(self) -> str:
        """Its key in `KINDS`."""
        return type(self.event).__name__

    def to_json(self, previous_sha256: str | None = None) -> str:
        """One line; numbers that are not finite are written as the strings `NaN`, `Infinity`, `-Infinity`.

        Args:
            previous_sha256: hash of the line before it, which the line is to carry.
        """
        kind = EARLIER_NAME_OF.get(self.kind, self.kind)
        line = {"time_s": self.time_s, "event": self.kind, "kind": kind, **named_floats(asdict(self.event))}
        if previous_sha256 is not None:
            line[PREVIOUS] = previous_sha256
        return json.dumps(line, allow_nan=False)

    @staticmethod
    def from_json(line: str) -> Record:
        """The record that `to_json` wrote.

        Raises:
            ValueError: the line is no JSON, its kind is unknown, or its payload does not fit the kind.
        """
        fields = json.loads(line)
        time_s, kind = fields.pop("time_s"), name_of_kind(fields)
        fields.pop("event", None)
        fields.pop("kind", None)
        if type(time_s) not in (int, float) or not math.isfinite(time_s):
            raise ValueError(f"its time is no number of seconds: {time_s!r}")
        fields.pop(PREVIOUS, None)
        if (known := kind_called(kind)) is None:
            raise ValueError(f"unknown kind of event {kind!r}")
        return Record(time_s=time_s, event=_adapter(known).validate_python(fields))


@cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(KINDS[kind])


def named_floats(value: Any) -> Any:
    """`value` with every float that JSON cannot write replaced by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: named_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [named_floats(item) for item in value]
    return value
