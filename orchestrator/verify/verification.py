"""What a run's folder proves: its event log through the ledger, and its checkpoints, in lines for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.events import types as events
from orchestrator.events.folder import EVENTS, JobFolder
from orchestrator.events.log import read_log
from orchestrator.spec.job_spec import Spec
from orchestrator.verify.checkpoint_audit import audit_checkpoints
from orchestrator.verify.ledger import Ledger, audit
from planner.wording import counted
from workers.protocol import JobError

MOST_SHOWN = 20


def verify_run(run: str) -> tuple[Ledger, list[str]]:
    """The ledger of `run`, a folder or a job's name, and its findings in words. Reads every checkpoint.

    Raises:
        JobError: there is no run, or its log is damaged.
    """
    location = find_folder(run)
    path = JobFolder(location).fetch_events()
    try:
        records = list(read_log(path))
    except OSError as error:
        raise JobError(f"{location} holds no event log: {error.strerror or error}") from error
    except ValueError as error:
        raise JobError(str(error)) from error
    train_samples, why_not = _train_samples(records, location)
    ledger = audit(records, train_samples)
    if why_not is not None:
        ledger.unproved.append(f"which samples the steps used: the data cannot be opened: {why_not}")
    found = audit_checkpoints(location, ledger)
    return ledger, report(ledger, found)


def find_folder(run: str) -> str:
    """The folder of `run`, which is a folder, an event log, or the name of a job.

    Raises:
        JobError: there is none.
    """
    if "://" in run or Path(run).is_dir():
        return run
    path = Path(run)
    if path.name == EVENTS and path.is_file():
        return str(path.parent)
    if (Path("runs") / run).is_dir():
        return str(Path("runs") / run)
    raise JobError(f"there is no folder {run}, nor runs/{run}: name a job's output folder")


def report(ledger: Ledger, checkpoints: int) -> list[str]:
    """The findings as lines for people."""
    lines = [
        f"{counted(ledger.steps, 'step')} in {counted(ledger.generations, 'generation')} of"
        f" {counted(ledger.epochs, 'controller')}; {counted(ledger.superseded, 'committed step')} run again from a"
        " checkpoint or snapshot",
        f"samples compared in {counted(ledger.proved_samples, 'step')}; {counted(checkpoints, 'checkpoint')} read",
    ]
    lines += [f"not proved: {text}" for text in ledger.unproved]
    lines += [f"WRONG: {text}" for text in ledger.wrong[:MOST_SHOWN]]
    if len(ledger.wrong) > MOST_SHOWN:
        lines.append(f"WRONG: {len(ledger.wrong) - MOST_SHOWN} more")
    if ledger.wrong:
        lines.append(f"{counted(len(ledger.wrong), 'thing')} wrong")
        return lines
    claims = ["no step missing or doubled"]
    if ledger.proved_samples == ledger.steps > 0:
        claims.append("no sample used twice or skipped")
    if checkpoints:
        claims.append("every checkpoint as it was written")
    lines.append(f"proved: {', '.join(claims)}")
    return lines


def _train_samples(records: list[events.Record], location: str) -> tuple[int | None, str | None]:
    """The number of samples that the run trains on, or why it is unknown. Imports torch."""
    from workers.data.registry import open_dataset

    specs: list[dict[str, Any]] = [
        record.event.spec for record in records if isinstance(record.event, events.Submitted)
    ]
    if not specs:
        return None, "the log has no spec"
    try:
        spec = Spec.model_validate(specs[-1])
        return open_dataset(spec.data, spec.model, location).dataset.train_samples, None
    except (JobError, OSError) as error:
        return None, str(error)
    except ValidationError as error:
        return None, f"its spec is of another version: {error.errors()[0]['msg']}"
