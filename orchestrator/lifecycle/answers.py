"""The answer to a client's command, where only the lifecycle knows what became of it. Pure."""

from __future__ import annotations

from orchestrator.events.types import Answered
from orchestrator.lifecycle.effects import AppendToLog
from orchestrator.lifecycle.states import JobData


def answer(job: JobData | None, id: str, done: bool, text: str) -> AppendToLog:
    """Return the log entry with the outcome of the command `id`."""
    return AppendToLog(Answered(id=id, done=done, step=0 if job is None else job.progress.step, text=text))
