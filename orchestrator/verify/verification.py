"""Proofs from a run's folder: its event log through chain and ledger, and its checkpoints, in lines for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.events import types as events
from orchestrator.events.log import DamagedLogError, open_regular, parse_line
from orchestrator.events.segments import head_of, whole_lines
from orchestrator.history.folder import EVENTS, JobFolder
from orchestrator.history.snapshot import LogPosition, position, position_of
from orchestrator.history.unreported import unreported
from orchestrator.spec.job_spec import Spec
from orchestrator.verify.chain import LogChain, read_chain
from orchestrator.verify.checkpoint_audit import audit_checkpoints, log_heads
from orchestrator.verify.ledger import Batches, Ledger, audit
from orchestrator.verify.rerun import audit_by_rerun
from planner.wording import counted
from workers.data.sampling import SampleStream
from workers.protocol.errors import JobError

MOST_SHOWN = 20


def verify_run(
    run: str, head: str | None = None, rerun: int = 0, say: Callable[[str], None] = lambda text: None
) -> tuple[Ledger, list[str]]:
    """The ledger of `run`, a folder or a job's name, and its findings in words. Reads every checkpoint.

    Args:
        head: hash of a line of the log, as an earlier call said it.
        rerun: how many steps to compute again.
        say: receives in words what takes a while.

    Raises:
        JobError: there is no run, or its log cannot be read.
    """
    location = find_folder(run)
    folder = JobFolder(location)
    # Before the log: a job that is at work goes on with it.
    witnesses = _witnesses(folder)
    log = _read(folder, witnesses, head)
    left = _left(location, log.records)
    log.records.extend(left)
    train_samples, why_not = _train_samples(log.records, location)
    ledger = audit(log.records, train_samples)
    if left:
        ledger.unproved.append(
            f"that {counted(len(left), 'report')} which ranks left beside the log are as"
            " they were written: a resumed job takes them into the log"
        )
    if why_not is not None:
        ledger.unproved.append(f"which samples the steps used: the data cannot be opened: {why_not}")
    _audit_chain(log, ledger, head)
    found = audit_checkpoints(location, ledger)
    if rerun:
        audit_by_rerun(log.records, ledger, location, rerun, say)
    elif ledger.steps:
        ledger.assumed.append(
            "the steps compute the losses and norms in the log: --rerun K computes K of them again"
        )
    return ledger, report(ledger, found)


def _left(location: str, records: list[events.Record]) -> list[events.Record]:
    """The reports that ranks left beside the log. Raises JobError if a file cannot be read."""
    try:
        return unreported(location, records)
    except OSError as error:
        raise JobError(f"cannot read what ranks left in {location}: {error.strerror or error}") from error


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


@dataclass(frozen=True, kw_only=True)
class _Witnesses:
    """Evidence about the log from other files of the folder."""

    heads: tuple[tuple[str, str], ...]
    """Pairs of a checkpoint and the hash of a log line."""
    snapshot: LogPosition | None


@dataclass(frozen=True, kw_only=True)
class _Log:
    """A log as it was read."""

    records: list[events.Record]
    chain: LogChain
    wrong: list[str]
    """Lines that are no events, and a snapshot of another log."""


def _witnesses(folder: JobFolder) -> _Witnesses:
    try:
        snapshot = position_of(_content(folder.fetch_snapshot()))
    except OSError:
        snapshot = None
    return _Witnesses(heads=tuple(log_heads(folder.location)), snapshot=snapshot)


def _read(folder: JobFolder, witnesses: _Witnesses, head: str | None) -> _Log:
    """Raises JobError if there is no log, or no line of it is an event."""
    try:
        contents = [(path, whole_lines(_content(path))) for path in folder.log_files()]
    except OSError as error:
        raise JobError(f"{folder.location} holds no event log: {error.strerror or error}") from error
    records: list[events.Record] = []
    wrong: list[str] = []
    for path, content in contents:
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                records.append(parse_line(line, path, number))
            except DamagedLogError as error:
                wrong.append(str(error).partition("\n")[0])
    if not records:
        raise JobError(wrong[0] if wrong else f"{folder.location} holds no event log")
    heads = [*witnesses.heads, *([("--head", head)] if head is not None else [])]
    if (at := witnesses.snapshot) is not None:
        line = _line_before(at, contents)
        if line is None:
            wrong.append(
                f"{folder.snapshot_path.name} was made when {at.file} had {at.offset:,} bytes, and ended otherwise: its"
                " end was cut off, or a line there was changed"
            )
        else:
            heads.append(line)
    chain = read_chain(((path.name, content) for path, content in contents), heads)
    return _Log(records=records, chain=chain, wrong=wrong)


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _line_before(at: LogPosition, contents: list[tuple[Path, bytes]]) -> tuple[str, str] | None:
    """The line that ends at `at`, as a witness of it; None if the log is another one there."""
    for path, content in contents:
        if path.name == at.file and position(path, at.offset) == at:
            head = head_of(content[: at.offset])
            return ("the snapshot", head) if head is not None else None
    return None


def _audit_chain(log: _Log, ledger: Ledger, head: str | None) -> None:
    """Add what the log's hashes say to `ledger`."""
    chain = log.chain
    ledger.wrong[:0] = [*chain.wrong, *log.wrong]
    ledger.unproved[:0] = chain.unproved()
    if chain.unchained == len(chain.lines):
        return
    if head is None:
        ledger.assumed.append(
            "nobody rewrote the log, its snapshot and the checkpoints' manifests all together: hashes have no key."
            " --head with a head of the log that was noted elsewhere tells"
        )
    ledger.facts.append(f"{counted(len(chain.lines), 'line')} of log, with head {chain.head}")
    ledger.claims.append(
        "no line of the log changed, missing or inserted" + (" before --head" if head is not None else "")
    )


def report(ledger: Ledger, checkpoints: int) -> list[str]:
    """The findings as lines for people: first what is not proved."""
    return [*_open(ledger), *_facts(ledger, checkpoints), *_wrong(ledger), _verdict(ledger, checkpoints)]


def _open(ledger: Ledger) -> Iterator[str]:
    yield from (f"not proved: {text}" for text in ledger.unproved)
    yield from (f"taken for granted: {text}" for text in ledger.assumed)
    if ledger.steps and not ledger.compared:
        yield "taken for granted: layers train as in plain autograd: this log has no comparison of them"


def _facts(ledger: Ledger, checkpoints: int) -> Iterator[str]:
    yield (
        f"{counted(ledger.steps, 'step')} in {counted(ledger.generations, 'generation')} of"
        f" {counted(ledger.epochs, 'controller')}; {counted(ledger.superseded, 'committed step')} run again from a"
        " checkpoint or snapshot"
    )
    yield (
        f"samples compared in {counted(ledger.proved_samples, 'step')}; {counted(checkpoints, 'checkpoint')} read"
    )
    if ledger.compared:
        left = f"; {counted(len(ledger.left_whole), 'layer')} left to it" if ledger.left_whole else ""
        yield f"{counted(len(ledger.compared), 'layer')} compared with plain autograd before they trained{left}"
    yield from ledger.facts


def _wrong(ledger: Ledger) -> Iterator[str]:
    yield from (f"WRONG: {text}" for text in ledger.wrong[:MOST_SHOWN])
    if len(ledger.wrong) > MOST_SHOWN:
        yield f"WRONG: {len(ledger.wrong) - MOST_SHOWN} more"


def _verdict(ledger: Ledger, checkpoints: int) -> str:
    if ledger.wrong:
        return f"{counted(len(ledger.wrong), 'thing')} wrong"
    claims = ["no step missing or doubled"]
    if ledger.proved_samples == ledger.steps > 0:
        claims.append("no sample used twice or skipped")
    if checkpoints:
        claims.append("every checkpoint as it was written")
    proved = "proved" if not ledger.unproved else "proved in part, see the first lines"
    return f"{proved}: {', '.join([*claims, *ledger.claims])}"


def _train_samples(records: list[events.Record], location: str) -> tuple[SampleStream | None, str | None]:
    """The samples that the run trains on, as `train_places` has them, or why they are unknown. Imports torch."""
    from workers.data.dataset import stream_of
    from workers.data.registry import open_dataset

    specs: list[dict[str, Any]] = [
        record.event.spec for record in records if isinstance(record.event, events.Submitted)
    ]
    if not specs:
        return None, "the log has no spec"
    try:
        spec = Spec.model_validate(specs[-1])
        dataset, batches = open_dataset(spec.data, spec.model, location).dataset, Batches.of(specs[-1])
        return stream_of(dataset, spec.data.buckets, batches.course), None
    except (JobError, OSError) as error:
        return None, str(error)
    except ValidationError as error:
        return None, f"its spec is of another version: {error.errors()[0]['msg']}"
