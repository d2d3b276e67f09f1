"""A job's life as a pure function `(order, state, stimulus) -> (state, commands)` over an explicit table.

Knows no cluster, no clock and no file: `controller.py` feeds it stimuli and carries its commands out. A pair
that is not in the table raises: nothing passes silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orchestrator import events
from orchestrator.states import (
    Aborted,
    Ask,
    Asked,
    Closing,
    Command,
    Ended,
    Failed,
    Failing,
    Finished,
    GraceOver,
    Hosting,
    HostStore,
    Join,
    Joined,
    Joining,
    Leave,
    Load,
    Loaded,
    Loading,
    Log,
    Order,
    Pending,
    Place,
    Placed,
    Placing,
    Prepare,
    Preparing,
    RankLost,
    Ready,
    Release,
    Released,
    Reported,
    Start,
    State,
    Stimulus,
    Stopping,
    StoreUp,
    Train,
    Training,
    Unplaceable,
    Wait,
)
from workers.digest import state_digest
from workers.protocol import CheckpointRef, Generation, Outcome, Request, StepReport

Step = tuple[State, tuple[Command, ...]]


class InvalidTransition(Exception):
    """A stimulus that the state has no answer to. Carries the job's story."""

    def __init__(self, state: State, stimulus: Stimulus, history: Sequence[Stimulus]) -> None:
        self.state = state
        self.stimulus = stimulus
        self.history = tuple(history)
        story = "\n".join(f"  {past!r}" for past in self.history) or "  (nothing)"
        super().__init__(f"{stimulus!r} has no meaning for a job that is {state!r}. Before it came:\n{story}")


def handle(order: Order, state: State, stimulus: Stimulus, history: Sequence[Stimulus] = ()) -> Step:
    """What becomes of the job, and what is to be done. `history` is told if the pair is illegal.

    Raises:
        InvalidTransition: the table has no entry for the pair.
    """
    transition = _TABLE.get((type(state), type(stimulus)))
    if transition is None:
        raise InvalidTransition(state, stimulus, history)
    return transition(order, state, stimulus)


def _everyone(order: Order) -> frozenset[int]:
    return frozenset(range(order.plan.world_size))


def _start(order: Order, state: Pending, stimulus: Start) -> Step:
    return Placing(), (Log(events.Issued(plan=order.plan)), Place())


def _placed(order: Order, state: Placing, stimulus: Placed) -> Step:
    return Preparing(_everyone(order)), (Prepare(),)


def _unplaceable(order: Order, state: Placing, stimulus: Unplaceable) -> Step:
    return _close(Failed(stimulus.reason, user_error=True))


def _ready(order: Order, state: Preparing, stimulus: Ready) -> Step:
    log = Log(
        events.RankStarted(rank=stimulus.rank, node=stimulus.node, host=stimulus.host, pid=stimulus.pid)
    )
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return Preparing(waiting), (log,)
    loading, commands = _load(order, order.checkpoints)
    return loading, (log, *commands)


def _load(order: Order, checkpoints: tuple[CheckpointRef, ...]) -> Step:
    start = checkpoints[0] if checkpoints else None
    return Loading(checkpoints, _everyone(order), ()), (Load(start),)


def _loaded(order: Order, state: Loading, stimulus: Loaded) -> Step:
    damage = state.damage + ((stimulus.damage,) if stimulus.damage is not None else ())
    logs = (
        (Log(events.Skipped(rank=stimulus.rank, damage=stimulus.damage)),)
        if stimulus.damage is not None
        else ()
    )
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting, damage=damage), logs
    if not damage:
        start = state.checkpoints[0] if state.checkpoints else None
        return Hosting(start), (HostStore(),)
    if older := state.checkpoints[1:]:
        loading, commands = _load(order, older)
        return loading, (*logs, *commands)
    worst = damage[0]
    closing, commands = _close(
        Failed(
            f"no checkpoint is whole: {worst.file} in {worst.path}: {worst.problem}, and there is none before"
            " it. Restore the file, or train anew in another job.output",
            user_error=True,
        )
    )
    return closing, (*logs, *commands)


def _store_up(order: Order, state: Hosting, stimulus: StoreUp) -> Step:
    generation = Generation(
        number=order.generation,
        epoch=order.epoch,
        members=tuple(range(order.plan.world_size)),
        store_host=stimulus.host,
        store_port=stimulus.port,
        timeout_s=order.timeout_s,
    )
    log = Log(events.Formed(generation=generation, start=state.start))
    return Joining(state.start, _everyone(order)), (log, Join(generation))


def _joined(order: Order, state: Joining, stimulus: Joined) -> Step:
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    step = state.start.step if state.start is not None else 0
    return Training(step, _everyone(order), ()), (Train(),)


def _reported(order: Order, state: Training | Stopping | Failing, stimulus: Reported) -> Step:
    log = Log(stimulus.report)
    if isinstance(stimulus.report, StepReport):
        return replace(state, step=stimulus.report.step), (log,)
    return state, (log,)


def _late_report(order: Order, state: State, stimulus: Reported) -> Step:
    return state, (Log(stimulus.report),)


def _ended(order: Order, state: Training | Stopping, stimulus: Ended) -> Step:
    outcomes = (*state.outcomes, stimulus.outcome)
    waiting = state.waiting - {stimulus.outcome.rank}
    log = Log(events.RankEnded(outcome=stimulus.outcome))
    if waiting:
        return replace(state, waiting=waiting, outcomes=outcomes), (log,)
    closing, commands = _close(_end(outcomes))
    return closing, (log, *commands)


def _end(outcomes: tuple[Outcome, ...]) -> Finished | Failed:
    """How a job ended whose ranks all ended as planned."""
    digests: dict[int, str] = {}
    for outcome in outcomes:
        for layer, digest in outcome.layer_digests:
            if digests.setdefault(layer, digest) != digest:
                return Failed(
                    f"replicas differ: rank {outcome.rank} holds other bits of layer {layer} than another",
                    user_error=False,
                )
    step = max(outcome.step for outcome in outcomes)
    for outcome in outcomes:
        if outcome.checkpoint_error is not None:
            return Failed(
                f"trained to step {step}, but its checkpoint was not written: {outcome.checkpoint_error}."
                " The checkpoints before it stay: make room, then go on with --resume",
                user_error=False,
            )
    stopped = any(outcome.stopped for outcome in outcomes)
    return Finished(step, stopped, state_digest([digests[layer] for layer in sorted(digests)]))


def _ask(order: Order, state: Training, stimulus: Asked) -> Step:
    commands = (Log(events.Requested(request=stimulus.request.value)), Ask(stimulus.request))
    if stimulus.request is Request.STOP:
        return Stopping(state.step, state.waiting, state.outcomes), commands
    return state, commands


def _ask_early(order: Order, state: State, stimulus: Asked) -> Step:
    """Before the first step there is nothing to save: a stop ends the job, a checkpoint is not needed."""
    log = Log(events.Requested(request=stimulus.request.value))
    if stimulus.request is not Request.STOP:
        return state, (log,)
    started_at = order.checkpoints[0].step if order.checkpoints else 0
    closing, commands = _close(Finished(started_at, stopped=True, state_sha256=None))
    return closing, (log, *commands)


def _log_loss(loss: RankLost) -> Log:
    return Log(events.RankFailed(rank=loss.rank, error=loss.error, details=loss.details))


def _lost(order: Order, state: State, stimulus: RankLost) -> Step:
    closing, commands = _close(_verdict(stimulus))
    return closing, (_log_loss(stimulus), *commands)


def _lost_in_a_group(
    order: Order, state: Joining | Training | Stopping | Failing, stimulus: RankLost
) -> Step:
    """A failure among ranks that wait for each other: one that was only cut off is not the cause."""
    if not stimulus.cut_off:
        return _lost(order, state, stimulus)
    log = _log_loss(stimulus)
    if isinstance(state, Failing):
        failing, commands = _heard(order, state, stimulus.rank)
        return failing, (log, *commands)
    step = state.step if isinstance(state, Training | Stopping) else 0
    ended = state.outcomes if isinstance(state, Training | Stopping) else ()
    others = _everyone(order) - {outcome.rank for outcome in ended} - {stimulus.rank}
    if not others:
        return _lost(order, state, stimulus)
    return Failing(step, others, stimulus), (log, Leave(others), Wait(order.grace_s))


def _ended_beside_a_failure(order: Order, state: Failing, stimulus: Ended) -> Step:
    return _heard(order, state, stimulus.outcome.rank)


def _joined_beside_a_failure(order: Order, state: Failing, stimulus: Joined) -> Step:
    return _heard(order, state, stimulus.rank)


def _heard(order: Order, state: Failing, rank: int) -> Step:
    waiting = state.waiting - {rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    return _close(_verdict(state.first))


def _grace_over(order: Order, state: Failing, stimulus: GraceOver) -> Step:
    return _close(_verdict(state.first))


def _verdict(loss: RankLost) -> Failed:
    return Failed(f"rank {loss.rank}: {loss.error}", loss.user_error)


def _abort(order: Order, state: State, stimulus: Aborted) -> Step:
    closing, commands = _close(Failed("aborted on request; the newest checkpoint stays", user_error=False))
    return closing, (Log(events.Requested(request="abort")), *commands)


def _close(end: Finished | Failed) -> Step:
    return Closing(end), (Release(),)


def _released(order: Order, state: Closing, stimulus: Released) -> Step:
    match state.end:
        case Finished(step, stopped, sha256):
            return state.end, (Log(events.Finished(step=step, stopped=stopped, state_sha256=sha256)),)
        case Failed(reason, user_error):
            return state.end, (Log(events.Failed(reason=reason, user_error=user_error)),)


def _ignore(order: Order, state: State, stimulus: Stimulus) -> Step:
    return state, ()


_BEFORE_TRAINING = (Pending, Placing, Preparing, Loading, Hosting, Joining)
_OVER = (Finished, Failed)

_TABLE: dict[tuple[type[State], type[Stimulus]], Callable[[Order, Any, Any], Step]] = {
    (Pending, Start): _start,
    (Placing, Placed): _placed,
    (Placing, Unplaceable): _unplaceable,
    (Preparing, Ready): _ready,
    (Loading, Loaded): _loaded,
    (Hosting, StoreUp): _store_up,
    (Joining, Joined): _joined,
    # A rank that joined early may report before the last one is heard.
    (Joining, Reported): _late_report,
    (Training, Reported): _reported,
    (Training, Ended): _ended,
    (Training, Asked): _ask,
    (Stopping, Reported): _reported,
    (Stopping, Ended): _ended,
    (Stopping, Asked): _ignore,
    (Failing, Reported): _reported,
    (Failing, Ended): _ended_beside_a_failure,
    (Failing, Joined): _joined_beside_a_failure,
    (Failing, Asked): _ignore,
    (Failing, GraceOver): _grace_over,
    (Closing, Released): _released,
    **{(state, Asked): _ask_early for state in _BEFORE_TRAINING},
    **{(state, RankLost): _lost for state in (Preparing, Loading, Hosting)},
    **{(state, RankLost): _lost_in_a_group for state in (Joining, Training, Stopping, Failing)},
    **{(state, Aborted): _abort for state in (*_BEFORE_TRAINING, Training, Stopping, Failing)},
    # Once the end is known, what is still on its way changes nothing; a report is kept.
    **{
        (state, late): _ignore
        for state in (Closing, *_OVER)
        for late in (
            Placed,
            Unplaceable,
            Ready,
            Loaded,
            StoreUp,
            Joined,
            Ended,
            RankLost,
            Asked,
            Aborted,
            GraceOver,
        )
    },
    **{(state, Reported): _late_report for state in (Closing, *_OVER)},
}
