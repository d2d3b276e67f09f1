"""Pause and resume on request: a paused job keeps its controller, its log and a checkpoint, and has no ranks.

A part of the lifecycle, and pure like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import moves, regroup
from orchestrator.lifecycle.commands import Dismiss, Log
from orchestrator.lifecycle.regroup import Step, close
from orchestrator.lifecycle.states import (
    Finished,
    Live,
    Order,
    Paused,
    Placing,
    Roster,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import Asked, PauseAsked, RankLost, Ready, ResumeAsked
from workers.protocol import Outcome, Request

REQUESTED = Log(events.Requested(request="pause"))


def ask(order: Order, state: Training, stimulus: PauseAsked) -> Step:
    """The ranks end as for a stop: after the step in flight, with a checkpoint of it."""
    roster, commands = regroup.ask_pause(replace(state.roster, halting=True))
    return replace(state, roster=roster), (REQUESTED, *commands)


def ask_between(order: Order, state: Placing | Live, stimulus: PauseAsked) -> Step:
    """No generation trains: the next one is asked."""
    return replace(state, roster=replace(state.roster, halting=True)), (REQUESTED,)


def ask_waiting(order: Order, state: Waiting, stimulus: PauseAsked) -> Step:
    """A job that waits for capacity pauses as soon as a checkpoint has all that its ranks hold."""
    after, commands = written(replace(state, roster=replace(state.roster, halting=True)))
    return after, (REQUESTED, *commands)


def written(state: Waiting) -> Step:
    """What the ranks of a job that waits were writing is written, if they were; pause if that was requested."""
    roster = state.roster
    if not roster.halting or state.saving is not None or _newest(roster) < state.step:
        return state, ()
    return _halt(roster, state.step)


def ended(order: Order, roster: Roster, outcomes: Sequence[Outcome]) -> Step:
    """All ranks have ended after the same step. Where its checkpoint could not be written, they try again."""
    step = outcomes[0].step
    if _newest(roster) >= step:
        return _halt(roster, step)
    failed = next((outcome for outcome in outcomes if outcome.checkpoint_error), outcomes[0])
    error = f"the checkpoint of step {step}, for the pause, was not written: {failed.checkpoint_error}"
    return regroup.assess(order, roster, (RankLost(failed.rank, error),))


def _halt(roster: Roster, step: int) -> Step:
    """Give all ranks back; those that are still starting, once they are up."""
    ranks = roster.alive
    roster, void = moves.voided(roster, "the job pauses")
    nobody = frozenset[int]()
    roster = replace(
        roster,
        members=(),
        alive=nobody,
        going=nobody,
        tried=nobody,
        nodes={},
        hosts={},
        early=(),
        prepared=None,
        save_after=None,
        asked=None,
        pausing=False,
        halting=False,
        paused=False,
        interrupted=False,
        round=roster.round + 1,
    )
    paused = Log(events.Paused(reason="on request", step=step, requested=True))
    return Paused(roster, step), (*void, paused, Dismiss(ranks))


def newcomer(order: Order, state: Paused, stimulus: Ready) -> Step:
    """A rank that was called before the pause is up."""
    one = frozenset({stimulus.rank})
    return replace(state, roster=regroup.without(state.roster, stimulus.rank)), (Dismiss(one),)


def resume(order: Order, state: Paused, stimulus: ResumeAsked) -> Step:
    """Ranks are placed as soon as there is room, however long that takes."""
    return go_on(state.roster, state.step), (Log(events.Requested(request="resume")),)


def go_on(roster: Roster, step: int) -> Waiting:
    """The job as it waits for the room to resume in."""
    return Waiting(
        replace(roster, paused=True, pauses=roster.pauses + 1, out_of_patience=False), "resumed", step
    )


def stop(order: Order, state: Paused, stimulus: Asked) -> Step:
    """A paused job can be stopped; a checkpoint it has."""
    log = Log(events.Requested(request=stimulus.request.value))
    if stimulus.request is not Request.STOP:
        return state, (log,)
    closing, commands = close(Finished(state.step, stopped=True, state_sha256=None))
    return closing, (log, *commands)


def _newest(roster: Roster) -> int:
    return roster.checkpoints[0].step if roster.checkpoints else 0
