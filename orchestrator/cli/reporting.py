"""Runs `freshet report`: writes the page about a run from its event log."""

from __future__ import annotations

from pathlib import Path

from orchestrator.history.folder import JobFolder
from orchestrator.report.page import write_report
from workers.protocol.errors import JobError


def report_command(run: str, out: Path | None) -> Path:
    """Write the page about the run in folder `run`, by default beside its log. Return its path.

    Raises:
        JobError: the folder holds no event log, the log is damaged, or the page cannot be written.
    """
    log = JobFolder(run).fetch_events()
    if not log.exists():
        raise JobError(f"{run} holds no event log: name a job's output folder")
    try:
        return write_report(log, out, run)
    except ValueError as error:
        raise JobError(str(error)) from error
    except OSError as error:
        raise JobError(f"cannot write {out or 'the report'}: {error.strerror or error}") from error
