"""Runs `freshet adapt replay`: repeats the decisions of a recorded planner, and says which differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from orchestrator.history.folder import PLANNER
from planner.adapt.live import Heard
from planner.adapt.recording import entries
from planner.adapt.replaying import Observed, ReplayedDecision, replayed
from planner.wording import counted
from workers.protocol.errors import JobError


def replay_command(recording: Path) -> None:
    """Print the changes and decisions of a recording.

    Args:
        recording: the file, or its job's folder.

    Raises:
        JobError: it cannot be read, or another planner decides otherwise.
    """
    path = recording / PLANNER if recording.is_dir() else recording
    way_out = f"[adapt] record = true has a job write one, {PLANNER} in its folder"
    different = 0
    try:
        for answer in replayed(entries(path, _lost)):
            different += not answer.same
            for line in lines(answer):
                print(line)
    except OSError as error:
        raise JobError(f"cannot read the recording {path}: {error.strerror or error}; {way_out}") from error
    except ValueError as error:
        raise JobError(f"{error}; {way_out}") from error
    if different:
        verb = "differs" if different == 1 else "differ"
        raise JobError(f"{path}: {counted(different, 'answer')} of the planner {verb} from those recorded")
    print("all answers are as recorded")


def lines(answer: Observed | ReplayedDecision) -> Iterator[str]:
    """Lines to print about an answer."""
    if isinstance(answer, ReplayedDecision):
        yield from _decision(answer)
        return
    step = max((seen.step for seen in answer.took.batch), default=0)
    then, now = answer.took.heard, answer.heard
    yield from (f"step {step}: {change}" for change in (*then.changes, *then.link_changes))
    yield from (f"step {step}: ignored: {why}" for _, why in then.ignored)
    if not answer.same:
        yield f"step {step}: DIFFERS: {_difference(then, now)}"


def _lost(size: int) -> None:
    print(f"{counted(size, 'byte')} that a planner had not written whole are left out")


def _decision(answer: ReplayedDecision) -> Iterator[str]:
    step, then, now = answer.asked.question.step, answer.recorded, answer.decision
    verb = "moves" if now.plan is not None else "stays"
    yield f"step {step}: {verb}: {now.reason}"
    if then is not None and not answer.same:
        yield f"step {step}: DIFFERS: recorded: {'moves' if then.plan is not None else 'stays'}: {then.reason}"


def _difference(then: Heard, now: Heard) -> str:
    recorded, repeated = (
        "; ".join((*heard.changes, *heard.link_changes)) or "no change" for heard in (then, now)
    )
    if recorded != repeated:
        return f"recorded {recorded}, now {repeated}"
    other = [field.name for field in fields(Heard) if getattr(then, field.name) != getattr(now, field.name)]
    return f"in {', '.join(other)}"
