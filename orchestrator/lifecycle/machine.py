"""A job's life as a pure function `(order, state, stimulus) -> (state, effects)` over an explicit table.

Knows no cluster, no clock and no file: `controller/event_loop.py` feeds it stimuli and has its effects carried out. A
pair of state and stimulus that is not in the table raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from orchestrator.commands.freeze import REPLACED
from orchestrator.events import types as events
from orchestrator.lifecycle import (
    ending,
    failures,
    in_training,
    joins,
    moves,
    pausing,
    planned_change,
    regroup,
    scaling,
    startup,
)
from orchestrator.lifecycle.answers import answer
from orchestrator.lifecycle.effects import AppendToLog, Ask, Effect, Propose, Step
from orchestrator.lifecycle.ending import close
from orchestrator.lifecycle.reports import take_report
from orchestrator.lifecycle.states import (
    Assessed,
    Assessing,
    Closing,
    FinishingCommit,
    Hosting,
    JobData,
    JobFailed,
    JobFinished,
    JobPaused,
    JobPlacing,
    Joining,
    Live,
    Loading,
    Order,
    Own,
    Pending,
    Planning,
    Preparing,
    Reclaiming,
    Regrouping,
    Same,
    Saving,
    State,
    Stopping,
    Training,
    Trains,
    Waiting,
)
from orchestrator.lifecycle.stimuli import (
    Aborted,
    Answer,
    CommitFinished,
    CopiesOverdue,
    Departed,
    FreezeAsked,
    Going,
    Joined,
    Migrate,
    Noted,
    PauseAsked,
    Placed,
    PlannedAhead,
    PlanReady,
    Positioned,
    RankLoaded,
    RankLost,
    RanksOverdue,
    Ready,
    Reclaimed,
    Released,
    Reported,
    ResumeAsked,
    Room,
    SaveOrStop,
    ScaleRequested,
    Solved,
    Start,
    Stimulus,
    StoreUp,
    TrainingEnded,
    Unplaceable,
    Unplannable,
    WaitOver,
    Weighed,
)
from planner.freezing import FreezePlan
from workers.protocol.orders import Request
from workers.protocol.reports import ActivationsKept, CheckpointReport, NoticeReport, Outcome, PrefixFrozen
from workers.reproducibility.digest import state_digest


class InvalidTransition(Exception):
    """The state has no transition for the stimulus. Carries the job's history."""

    def __init__(self, state: State, stimulus: Stimulus, history: Sequence[Stimulus]) -> None:
        self.state = state
        self.stimulus = stimulus
        self.history = tuple(history)
        story = "\n".join(f"  {past!r}" for past in self.history) or "  (nothing)"
        super().__init__(f"{stimulus!r} is not allowed in state {state!r}. Stimuli before it:\n{story}")


def handle(order: Order, state: State, stimulus: Stimulus, history: Sequence[Stimulus] = ()) -> Step[State]:
    """Return the job's next state and the effects to carry out. `history` is for the error message.

    Raises:
        InvalidTransition: the table has no entry for the pair.
    """
    if isinstance(state, Live) and _stale(state.job, stimulus):
        return state, ()
    transition = TABLE.get((type(state), type(stimulus)))
    if transition is None:
        raise InvalidTransition(state, stimulus, history)
    return transition(order, state, stimulus)


def _stale(job: JobData, stimulus: Stimulus) -> bool:
    """Whether `stimulus` answers an effect of an abandoned attempt, or comes from a rank known to be dead."""
    match stimulus:
        case RankLost(rank=rank) | Ready(rank=rank):
            return rank not in job.membership.alive | job.membership.starting
        case Positioned(position=one) | TrainingEnded(outcome=one) | Departed(parted=one):
            return stimulus.round != job.progress.round or one.rank not in job.membership.alive
        case Reclaimed(rank=rank) | CommitFinished(rank=rank) | RankLoaded(rank=rank) | Joined(rank=rank):
            return stimulus.round != job.progress.round or rank not in job.membership.alive
        case (
            PlanReady(round=number)
            | Unplannable(round=number)
            | StoreUp(round=number)
            | Weighed(round=number)
        ):
            return number != job.progress.round
        case _:
            return False


def _reported(order: Order, state: Own, stimulus: Reported) -> Step[Own]:
    if isinstance(stimulus.report, NoticeReport):
        return joins.noticed(order, state, stimulus.report)
    job, news = take_report(state.job, stimulus.report)
    effects: list[Effect] = []
    for report in news:
        effects.append(AppendToLog(report))
        if isinstance(state, Training | Stopping):
            job, moving = moves.take_report(order, job, report)
            job, changing = planned_change.take_report(order, job, report)
            effects += [*moving, *changing]
        if (
            isinstance(state, Training)
            and isinstance(report, PrefixFrozen | ActivationsKept)
            and in_training.to_pack(order, job)
        ):
            effects += in_training.weigh(order, job)
    return replace(state, job=job), tuple(effects)


def _reported_waiting(order: Order, state: Waiting, stimulus: Reported) -> Step[Waiting | JobPaused]:
    """Idle ranks may have written a checkpoint of what they hold, or could not."""
    state, effects = _reported(order, state, stimulus)
    if not isinstance(stimulus.report, CheckpointReport):
        return state, effects
    written = replace(state, saving=None) if stimulus.report.step == state.saving else state
    after, more = pausing.written(written)
    return after, (*effects, *more)


def _reported_saving(order: Order, state: Saving, stimulus: Reported) -> Step[Saving | Closing]:
    """Likewise, and the job ends with that."""
    state, effects = _reported(order, state, stimulus)
    if not isinstance(stimulus.report, CheckpointReport):
        return state, effects
    after, more = ending.saved(state)
    return after, (*effects, *more)


def _late_report(order: Order, state: Same, stimulus: Reported) -> Step[Same]:
    return state, (AppendToLog(stimulus.report),)


def _ended(
    order: Order, state: Trains, stimulus: TrainingEnded
) -> Step[Trains | JobPaused | Assessed | Closing]:
    outcomes = (*state.outcomes, stimulus.outcome)
    waiting = state.waiting - {stimulus.outcome.rank}
    job = state.job
    if job.intents.pausing and not job.intents.stopping and stimulus.outcome.stopped:
        if waiting:
            return replace(state, waiting=waiting, outcomes=outcomes), ()
        if job.intents.halting:
            return pausing.ended(order, job, outcomes)
        return regroup.assess(order, replace(job, intents=replace(job.intents, asked="drain")), ())
    log = AppendToLog(events.RankEnded(outcome=stimulus.outcome))
    if waiting:
        return replace(state, waiting=waiting, outcomes=outcomes), (log,)
    closing, effects = close(_end(job, outcomes))
    return closing, (log, *effects)


def _end(job: JobData, outcomes: tuple[Outcome, ...]) -> JobFinished | JobFailed:
    """The end of a job whose ranks all ended as planned."""
    digests: dict[int, str] = {}
    for outcome in outcomes:
        for layer, digest in outcome.layer_digests:
            if digests.setdefault(layer, digest) != digest:
                return JobFailed(
                    f"replicas differ: rank {outcome.rank} and another one hold different bits of layer {layer}",
                    user_error=False,
                )
    step = max(outcome.step for outcome in outcomes)
    for outcome in outcomes:
        if outcome.checkpoint_error is not None:
            return JobFailed(
                f"trained to step {step}, but its checkpoint was not written: {outcome.checkpoint_error}."
                f" {_way_out(job)}",
                user_error=False,
            )
    stopped = any(outcome.stopped for outcome in outcomes)
    reached = max(outcome.reached for outcome in outcomes)
    plateau = max(outcome.plateau for outcome in outcomes)
    sha256 = state_digest([digests[layer] for layer in sorted(digests)])
    return JobFinished(step, stopped, sha256, reached, plateau)


def _way_out(job: JobData) -> str:
    """Say what to do about a job whose last checkpoint was not written."""
    if not job.progress.checkpoints:
        return "No earlier checkpoint exists, so these steps are lost: make room, then train in another job.output"
    return f"Make room: --resume goes on from the checkpoint of step {job.progress.checkpoints[0].step}"


def _departed(order: Order, state: Trains, stimulus: Departed) -> Step[Trains | Assessed]:
    waiting = state.waiting - {stimulus.parted.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    asked = state.job.intents.asked or ("pack" if stimulus.parted.thawed else "move")
    return regroup.assess(order, replace(state.job, intents=replace(state.job.intents, asked=asked)), ())


def _ask(order: Order, state: Training, stimulus: SaveOrStop) -> Step[Training | Stopping]:
    first = state.job.membership.members[0]
    effects = (AppendToLog(events.Requested(request=stimulus.request.value)), Ask(stimulus.request, first))
    if stimulus.request is Request.STOP:
        job = replace(state.job, intents=replace(state.job.intents, stopping=True))
        return Stopping(job, state.waiting, state.outcomes), effects
    if stimulus.request is Request.CHECKPOINT:
        state = replace(
            state,
            job=replace(state.job, intents=replace(state.job.intents, save_after=state.job.progress.step)),
        )
    return state, effects


def _ask_between(order: Order, state: Own, stimulus: SaveOrStop) -> Step[Own | Closing]:
    """No generation trains: the request waits for the next one's first commit."""
    if not state.job.progress.trained:
        return _ask_early(order, state, stimulus)
    job = state.job
    job = (
        replace(job, intents=replace(job.intents, stopping=True))
        if stimulus.request is Request.STOP
        else replace(job, intents=replace(job.intents, save_after=job.progress.step))
    )
    return replace(state, job=job), (AppendToLog(events.Requested(request=stimulus.request.value)),)


def _ask_waiting(order: Order, state: Waiting, stimulus: SaveOrStop) -> Step[Waiting | Saving | Closing]:
    """A job that waits for capacity stops once what its ranks hold is written."""
    if stimulus.request is not Request.STOP or not state.job.progress.trained:
        return _ask_between(order, state, stimulus)
    after, effects = ending.end_waiting(state, "")
    return after, (AppendToLog(events.Requested(request=stimulus.request.value)), *effects)


def _ask_early(order: Order, state: Same, stimulus: SaveOrStop) -> Step[Same | Closing]:
    """Before the first step there is nothing to save: a stop ends the job, a checkpoint is not needed."""
    log = AppendToLog(events.Requested(request=stimulus.request.value))
    if stimulus.request is not Request.STOP:
        return state, (log,)
    step = order.checkpoints[0].step if order.checkpoints else 0
    closing, effects = close(JobFinished(step, stopped=True, state_sha256=None))
    return closing, (log, *effects)


def _migrate(order: Order, state: Training, stimulus: Migrate) -> Step[Training]:
    job, effects = moves.request(order, state.job, stimulus.move)
    return replace(state, job=job), effects


def _migrate_not(order: Order, state: Same, stimulus: Migrate) -> Step[Same]:
    job = state.job if isinstance(state, Live) else None
    return state, moves.refused(job, stimulus.move, "the job does not train now: no layers move; ask again")


def _scale(order: Order, state: Own, stimulus: ScaleRequested) -> Step[Own]:
    job, effects = scaling.begin(order, state.job, stimulus)
    if isinstance(state, Training):
        job, more = in_training.consider(order, job)
        effects = (*effects, *more)
    return replace(state, job=job), effects


def _overdue(order: Order, state: Own, stimulus: RanksOverdue) -> Step[Own]:
    trains = isinstance(state, Training)
    job, effects = scaling.overdue(order, state.job, stimulus, trains=trains)
    if trains and job is not state.job:
        job, more = in_training.consider(order, job)
        effects = (*effects, *more)
    return replace(state, job=job), effects


def _planned_ahead(order: Order, state: Training, stimulus: PlannedAhead) -> Step[Training]:
    job, effects = planned_change.planned(order, state.job, stimulus)
    return replace(state, job=job), effects


def _copies_overdue(order: Order, state: Own, stimulus: CopiesOverdue) -> Step[Own]:
    if not isinstance(state, Training):
        return replace(state, job=planned_change.hurry(state.job, stimulus)), ()
    job, effects = planned_change.overdue(state.job, stimulus)
    return replace(state, job=job), effects


def _solved(order: Order, state: Training, stimulus: Solved | FreezeAsked) -> Step[Training]:
    after, logs = _solved_between(order, state, stimulus)
    if after is state:
        return state, logs
    return after, (*logs, Propose(_freeze_plan(stimulus), state.job.membership.members))


def _solved_between(order: Order, state: Own, stimulus: Solved | FreezeAsked) -> Step[Own]:
    job, plan = state.job, _freeze_plan(stimulus)
    known = [*job.progress.freeze, *([job.intents.proposed] if job.intents.proposed is not None else [])]
    if any(other.key > plan.key for other in known):
        return state, _freeze_not(job, stimulus, REPLACED)
    state = replace(state, job=replace(job, intents=replace(job.intents, proposed=plan)))
    match stimulus:
        case Solved(solution=solution) | FreezeAsked(change=solution, solution=None):
            return state, (AppendToLog(solution),)
        case FreezeAsked(change=change, solution=solution):
            assert solution is not None
            return state, (AppendToLog(change), AppendToLog(solution))


def _freeze_ending(order: Order, state: Own, stimulus: FreezeAsked) -> Step[Own]:
    return state, _freeze_not(state.job, stimulus, "the job is about to end: its freezing stays as it is")


def _freeze_not(job: JobData, stimulus: Solved | FreezeAsked, why: str) -> tuple[Effect, ...]:
    """A request that is not followed is refused; a solution that a request has replaced is dropped."""
    if isinstance(stimulus, Solved) or not stimulus.change.id:
        return ()
    return (answer(job, stimulus.change.id, False, why),)


def _freeze_plan(stimulus: Solved | FreezeAsked) -> FreezePlan:
    return stimulus.solution.plan if isinstance(stimulus, Solved) else stimulus.change.plan


def _note(order: Order, state: Same, stimulus: Noted) -> Step[Same]:
    return state, (AppendToLog(stimulus.event),)


def _wait_over(order: Order, state: Own, stimulus: WaitOver) -> Step[Own]:
    if not _pause_lasts(state.job, stimulus):
        return state, ()
    progress = replace(state.job.progress, out_of_patience=True)
    return replace(state, job=replace(state.job, progress=progress)), ()


def _wait_over_waiting(order: Order, state: Waiting, stimulus: WaitOver) -> Step[Waiting | Saving | Closing]:
    return ending.out_of_patience(order, state) if _pause_lasts(state.job, stimulus) else (state, ())


def _pause_lasts(job: JobData, stimulus: WaitOver) -> bool:
    """Whether the job still waits in the pause for which the timer was set."""
    return job.progress.paused and stimulus.pause == job.progress.pauses


def _abort(order: Order, state: State, stimulus: Aborted) -> Step[Closing]:
    closing, effects = close(
        JobFailed("cancelled at once, on request; the newest checkpoint stays", user_error=False)
    )
    return closing, (AppendToLog(events.Requested(request="abort")), *effects)


def _released(order: Order, state: Closing, stimulus: Released) -> Step[JobFinished | JobFailed]:
    match state.end:
        case JobFinished(step, stopped, sha256, reached, plateau):
            end = events.Finished(
                step=step, stopped=stopped, state_sha256=sha256, reached=reached, plateau=plateau
            )
            return state.end, (AppendToLog(end),)
        case JobFailed(reason, user_error):
            return state.end, (AppendToLog(events.Failed(reason=reason, user_error=user_error)),)


def _ignore(order: Order, state: Same, stimulus: Stimulus) -> Step[Same]:
    return state, ()


_REGROUPING, _LIVE = get_args(Regrouping), get_args(Live)
_OVER = (Closing, JobFinished, JobFailed)

TABLE: dict[tuple[type[State], type[Stimulus]], Callable[[Order, Any, Any], Step[State]]] = {
    (Pending, Start): startup.start,
    (JobPlacing, Placed): startup.placed,
    (JobPlacing, Unplaceable): startup.unplaceable,
    # May come at any time as long as there are ranks; entries below override some of these.
    **{(state, Reported): _reported for state in _LIVE},
    **{(state, Ready): joins.newcomer for state in _LIVE},
    **{(state, RankLost): failures.lost_regrouping for state in _REGROUPING},
    **{(state, SaveOrStop): _ask_early for state in (Pending, JobPlacing)},
    **{(state, SaveOrStop): _ask_between for state in _LIVE},
    **{(state, PauseAsked): pausing.ask_between for state in (JobPlacing, *_LIVE)},
    **{(state, ResumeAsked): _ignore for state in (Pending, JobPlacing, *_LIVE)},
    **{(state, Migrate): _migrate_not for state in (Pending, JobPlacing, *_LIVE)},
    **{(state, ScaleRequested): _scale for state in (JobPlacing, *_LIVE)},
    **{(state, Aborted): _abort for state in (Pending, JobPlacing, *_LIVE)},
    **{(state, Going): joins.leaving for state in _LIVE},
    **{(state, Noted): _note for state in (Pending, JobPlacing, *_LIVE)},
    **{(state, WaitOver): _wait_over for state in _LIVE},
    **{(state, RanksOverdue): _overdue for state in (JobPlacing, *_LIVE)},
    **{(state, CopiesOverdue): _copies_overdue for state in _LIVE},
    **{(state, PlannedAhead): _ignore for state in _LIVE},
    **{
        (state, stimulus): _solved_between
        for state in (*_REGROUPING, Waiting, JobPaused)
        for stimulus in (Solved, FreezeAsked)
    },
    # The controller looks at the cluster again soon.
    **{(state, Room): _ignore for state in (JobPlacing, *_LIVE)},
    (Waiting, Reported): _reported_waiting,
    (Waiting, Ready): joins.newcomer_while_waiting,
    (Waiting, SaveOrStop): _ask_waiting,
    (Waiting, WaitOver): _wait_over_waiting,
    (Saving, Reported): _reported_saving,
    (Preparing, Ready): startup.ready,
    (Preparing, RankLost): startup.lost_preparing,
    (Reclaiming, Reclaimed): startup.reclaimed,
    (Reclaiming, RankLost): startup.lost_reclaiming,
    (Assessing, Positioned): regroup.positioned,
    (Assessing, RankLost): failures.lost_assessing,
    (FinishingCommit, CommitFinished): regroup.commit_finished,
    (Planning, PlanReady): regroup.planned,
    (Planning, Unplannable): regroup.unplannable,
    (Loading, RankLoaded): regroup.loaded,
    (Hosting, StoreUp): regroup.store_up,
    (Joining, Joined): regroup.joined,
    (Training, RankLost): failures.lost_training,
    (Training, TrainingEnded): _ended,
    (Training, Departed): _departed,
    (Training, PlannedAhead): _planned_ahead,
    (Training, SaveOrStop): _ask,
    (Training, PauseAsked): pausing.ask,
    (Training, Migrate): _migrate,
    (Training, Solved): _solved,
    (Training, FreezeAsked): _solved,
    (Training, Room): joins.room,
    (Training, Weighed): joins.weighed,
    (Stopping, RankLost): failures.lost_training,
    (Stopping, TrainingEnded): _ended,
    (Stopping, Departed): _departed,
    (Stopping, SaveOrStop): _ignore,
    (Stopping, PauseAsked): _ignore,
    (Stopping, Solved): _ignore,
    (Stopping, FreezeAsked): _freeze_ending,
    (Stopping, Weighed): _ignore,
    (Waiting, Room): joins.room,
    (Waiting, PauseAsked): pausing.ask_waiting,
    (Pending, PauseAsked): _ignore,
    (JobPaused, SaveOrStop): pausing.stop,
    (JobPaused, PauseAsked): _ignore,
    (JobPaused, ResumeAsked): pausing.resume,
    (JobPaused, Ready): pausing.newcomer,
    (JobPaused, RankLost): failures.lost_aside,
    (Waiting, RankLost): failures.lost_waiting,
    (Saving, RankLost): failures.lost_saving,
    (Saving, FreezeAsked): _freeze_ending,
    **{(Saving, late): _ignore for late in (SaveOrStop, PauseAsked, Solved, *get_args(Answer))},
    (Closing, Released): _released,
    # Once the end is known, late stimuli change nothing; reports are still logged.
    **{
        (state, late): _ignore
        for state in _OVER
        for late in (
            Placed,
            Unplaceable,
            Ready,
            RankLost,
            Solved,
            FreezeAsked,
            SaveOrStop,
            PauseAsked,
            ResumeAsked,
            Migrate,
            ScaleRequested,
            Aborted,
            Room,
            Going,
            WaitOver,
            RanksOverdue,
            CopiesOverdue,
            PlannedAhead,
            *get_args(Answer),
        )
    },
    **{(state, Reported): _late_report for state in _OVER},
    **{(state, Noted): _note for state in _OVER},
}
