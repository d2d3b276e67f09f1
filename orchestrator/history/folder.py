"""The job's folder: which job owns it, what is in it, whether a job may start or resume there.

A local path, or a URI that pyarrow's filesystems accept; there the event log is cut into segments, see `segments.py`,
and this machine keeps them in the user's cache. Knows no ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from orchestrator.events import types as events
from orchestrator.events.log import EventLog, read_log
from orchestrator.events.segments import FOLDER, SegmentedLog, Segments
from orchestrator.events.types import Record
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.history.job_view import fold
from orchestrator.history.snapshot import SNAPSHOT, goes_further, load, position, write_snapshot
from planner.plan import Plan
from planner.wording import counted
from workers.checkpoint.storage import join, open_folder
from workers.config import WorkerConfig
from workers.protocol.errors import JobError
from workers.protocol.goals import Goals
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import StepReport

MARKER = "job.json"
EVENTS = "events.jsonl"
PLANNER = "planner.jsonl.gz"
PROFILE = "profile.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
_BEFORE_A_RUN = {"data", LOCK}
"""Entries that a folder without a run may contain: the token cache, made when a spec is checked, and the lock of a
start that went no further."""
_MAY_DIFFER = {
    "data.cache",
    "data.path",
    "data.validation_path",
    "data.tokenizer",
    "data.validation_batches",
    "model.weights",
    "optimizer.max_skipped_steps",
}
"""Settings of the ranks that a resumed job may change, in sections that it otherwise may not."""
MAY_CHANGE = (
    "job.steps, job.epochs, job.stop_at, job.patience, job.validate_every, job.timeline_every, job.curvature_every,"
    " job.sample_tokens,"
    " pipeline.ranks and pipeline.pipelines (with the same replicas), pipeline.schedule, pipeline.chunks,"
    " pipeline.partition, pipeline.recompute, pipeline.shard between none and optimizer, freeze.pack,"
    " freeze.frozen_cost, freeze.cache, freeze.cache_bytes, freeze.cache_disk_bytes,"
    f" {', '.join(sorted(_MAY_DIFFER))}, [checkpoint], [elastic], [adapt] and [cluster]"
)


@dataclass(frozen=True, kw_only=True)
class Marker:
    """`job.json`: which job owns the folder."""

    name: str
    """Name of the job."""
    run: str
    """Random for each start, so that a node can distinguish this folder from another at the same path."""
    spec: Mapping[str, Any]
    """The resolved spec of the newest start."""

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


class JobFolder:
    """The folder of one job at `location`.

    Args:
        option: the option of the command line that named it; None: `job.output` of the spec did. Errors say so.
    """

    def __init__(self, location: str, option: str | None = None) -> None:
        self.location = location
        self._key = option or "job.output"
        self._named = f"{option} {location}" if option is not None else f"job.output = {location}"
        self._resumes = option is None
        """Whether the command that named it can go on with a run."""
        self._folder = open_folder(location)
        self._published_view = b""

    @property
    def events_path(self) -> Path:
        """The local file of the event log."""
        if "://" not in self.location:
            return Path(self.location) / EVENTS
        key = hashlib.sha256(self.location.encode()).hexdigest()[:16]
        return Path.home() / ".cache" / "freshet" / "events" / key / EVENTS

    @property
    def planner_path(self) -> Path:
        """The local file of the planner's recording, beside the event log."""
        return self.events_path.with_name(PLANNER)

    @cached_property
    def segments(self) -> Segments | None:
        """The segments of the event log; None if one file holds all of it."""
        if "://" not in self.location:
            return None
        return Segments(self.events_path.parent / FOLDER, self._folder.child(FOLDER))

    def fetch_events(self) -> Path:
        """Bring `events_path` up to date with the log in the folder and on this machine, and the profile beside it, if
        there is one. Return `events_path`."""
        path = self.events_path
        if self.segments is not None:
            if self.segments.fetch():
                self.segments.assemble(path)
            if self._folder.exists(PROFILE):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(PROFILE).write_bytes(self._folder.read(PROFILE))
        return path

    def log_files(self) -> list[Path]:
        """The files that hold the log, oldest first, fetched if necessary."""
        if self.segments is not None:
            return self.segments.fetch()
        return [self.events_path] if self.events_path.exists() else []

    @property
    def snapshot_path(self) -> Path:
        """The local file with the newest view of the log."""
        return self.events_path.with_name(SNAPSHOT)

    def fetch_snapshot(self) -> Path:
        """Replace the local snapshot if the copy in the folder is newer. Return `snapshot_path`."""
        path = self.snapshot_path
        if self.segments is not None and self._folder.exists(SNAPSHOT):
            copy = self._folder.read(SNAPSHOT)
            if goes_further(copy, _content(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(copy)
        return path

    def open_log(self, epoch: int) -> EventLog | SegmentedLog:
        """Open the log for the controller of incarnation `epoch`.

        Raises:
            OSError: it cannot be written.
        """
        return self.segments.begin(epoch) if self.segments is not None else EventLog(self.events_path)

    def durable_head(self, written: str) -> str | None:
        """Hash of the newest line that the log keeps even if this machine is lost; None if there is none.

        Args:
            written: hash of the newest line that was written.
        """
        return written if self.segments is None else self.segments.published_head

    def add(self, *records: Record) -> None:
        """Write more records to the log of a job that has ended, and a snapshot that has them.

        Raises:
            OSError: it cannot be written.
        """
        log = self.open_log(self.segments.newest_epoch() if self.segments is not None else 0)
        for record in records:
            log.append(record)
        log.close()
        view = load(self.log_files(), self.fetch_snapshot()).view
        write_snapshot(self.snapshot_path, view.to_json(), position(log.path, log.size))
        self.publish_log()
        self.fetch_events()

    def publish_log(self) -> None:
        """Copy this machine's log and view into the folder, unless they are there.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.segments is None:
            return
        # Read first: the copy of the view must not go further than the copy of the log.
        view = _content(self.snapshot_path)
        self.segments.publish()
        if view and view != self._published_view:
            self._folder.write(SNAPSHOT, view)
            self._published_view = view

    def publish(self, path: Path) -> None:
        """Copy the local file `path` into the folder, unless it is there."""
        if "://" in self.location:
            self._folder.write(path.name, path.read_bytes())

    def marker(self) -> Marker | None:
        """The folder's marker; None if no job owns the folder.

        Raises:
            JobError: `job.json` cannot be read.
        """
        try:
            fields = json.loads(self._folder.read(MARKER))
            return Marker(name=fields["name"], run=fields["run"], spec=fields["spec"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise JobError(
                f"cannot read {join(self.location, MARKER)}: {error}; choose another {self._key}"
            ) from error

    def claim(self, name: str, spec: Mapping[str, Any]) -> Marker:
        """Write `job.json`.

        Raises:
            JobError: a controller uses the folder, or it cannot be written.
        """
        marker = Marker(name=name, run=secrets.token_hex(8), spec=spec)
        lock = self.lock()
        try:
            self._folder.write(MARKER, marker.to_bytes())
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            if lock is not None:
                lock.close()
        return marker

    def lock(self) -> IO[bytes] | None:
        """Lock the folder until the returned file is closed; None if the file system has no locks.

        Raises:
            JobError: another controller holds it, or it cannot be written.
        """
        if "://" in self.location:
            return None
        try:
            Path(self.location).mkdir(parents=True, exist_ok=True)
            file = (Path(self.location) / LOCK).open("wb")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise JobError(
                f"another run is at work in {self.location}: wait for it, stop it, or choose another output"
            ) from None
        except OSError:  # a file system without locks
            file.close()
            return None
        return file

    def admit(self, name: str, *, resume: bool) -> None:
        """Check that the job `name` may start here, or resume.

        Raises:
            JobError: the folder holds another job, a run of this one while `resume` is not set, or nothing to
                resume.
        """
        marker = self.marker()
        if marker is None:
            if resume:
                raise JobError(
                    f"--resume: {self.location} holds no run: check job.output, or start without --resume"
                )
            if strangers := sorted({*self._names()} - _BEFORE_A_RUN):
                raise JobError(
                    f"{self._named} holds {', '.join(strangers[:3])} and no run: choose an empty folder"
                )
            return
        if marker.name != name:
            raise JobError(
                f"{self._named} holds another job, {marker.name!r}, and this one is {name!r}:"
                f" choose another {self._key}"
            )
        if resume:
            return
        steps = self.steps()
        if steps or self._folder.child(CHECKPOINTS).names():
            go_on = "go on from its newest checkpoint with --resume (in Python: resume=True), or "
            raise JobError(
                f"{self._named} holds a run of {name!r} with {counted(steps, 'step')}:"
                f" {go_on if self._resumes else ''}choose another {self._key}"
            )

    def _names(self) -> tuple[str, ...]:
        try:
            return self._folder.names()
        except OSError as error:
            raise JobError(f"{self._named} cannot be used: {_reason(error)}") from error

    def _unwritable(self, error: OSError) -> JobError:
        return JobError(f"cannot write to {self._named}: {_reason(error)}")

    def steps(self) -> int:
        """Steps committed here so far. Raises JobError if the event log is damaged."""
        return max(
            (record.event.step for record in self.records() if isinstance(record.event, StepReport)),
            default=0,
        )

    def incarnations(self) -> tuple[int, int]:
        """The highest epoch of a controller and the highest generation of ranks in the log.

        Raises:
            JobError: the event log is damaged.
        """
        epoch = generation = 0
        for event in (record.event for record in self.records()):
            if isinstance(event, events.Submitted):
                epoch = max(epoch, event.epoch)
            elif isinstance(event, events.Formed):
                generation = max(generation, event.generation.number)
        return epoch, generation

    def newest_plan(self) -> Plan | None:
        """The newest issued plan. Raises JobError if the event log is damaged."""
        issued = [record.event.plan for record in self.records() if isinstance(record.event, events.Issued)]
        return issued[-1] if issued else None

    def keep_profile(self, text: str | None) -> None:
        """Write the profile that the plan is based on, also beside the event log: pictures and resumed runs use it.
        None deletes the profile of an earlier start: the plan is based on none.

        Raises:
            JobError: it cannot be written.
        """
        beside = open_folder(str(self.events_path.parent))
        try:
            for folder in (self._folder, beside) if "://" in self.location else (self._folder,):
                if text is not None:
                    folder.write(PROFILE, text.encode())
                else:
                    folder.remove(PROFILE)
        except OSError as error:
            raise self._unwritable(error) from error

    def profile(self) -> str | None:
        """The newest profile; None if there is none or it cannot be read."""
        try:
            return self.fetch_events().with_name(PROFILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def freeze_history(self) -> FreezeHistory:
        """The freezing measurements and decisions so far. Raises JobError if the event log is damaged."""
        return fold(self.records()).freeze_history()

    def records(self) -> Iterator[events.Record]:
        """The records of the log, oldest first. Raises JobError if it is damaged."""
        path = self.fetch_events()
        if not path.exists():
            return
        try:
            yield from read_log(path)
        except ValueError as error:
            problem = str(error).partition("\n")[0]
            raise JobError(
                f"{problem}: delete that line to do without it, or choose another {self._key}"
            ) from error


def starting_points(config: WorkerConfig, shard: str = "none") -> tuple[CheckpointRef, ...]:
    """The checkpoints to resume from, newest first. Imports torch.

    A damaged one stays in: the ranks report it and take the one before.

    Args:
        shard: of the plan to resume with.

    Raises:
        JobError: there is none, none is readable, or the newest readable one has other settings.
    """
    from workers.checkpoint.coordination import manifest_mismatch
    from workers.checkpoint.folder import DamagedCheckpointError, checkpoints, read_manifest

    found = checkpoints(config.job.folder)
    if not found:
        raise JobError(
            f"--resume: {config.job.folder} holds no checkpoint: start again in another job.output, and set"
            " checkpoint.every_steps to have one before the end"
        )
    damage = []
    for ref in found:
        try:
            manifest = read_manifest(ref)
        except DamagedCheckpointError as error:
            damage.append(str(error))
            continue
        changed = {
            key: values
            for key, values in manifest_mismatch(manifest, config, shard).items()
            if key not in _MAY_DIFFER
        }
        if changed:
            differences = "; ".join(
                f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items()
            )
            raise JobError(
                f"--resume: the checkpoint of step {ref.step} was made with other settings: {differences}."
                f" Set them back, or start again in another job.output. What may change: {MAY_CHANGE}"
            )
        last_step = config.course(manifest.carried.legs).last_step(config.job.steps)
        if ref.step > last_step:
            length, longer = f"job.steps = {config.job.steps}", f"set job.steps to more than {ref.step}"
            if manifest.carried.legs:
                length += f", which the batch that has grown takes in {counted(last_step, 'step')}"
                longer = "set job.steps to more"
            if config.job.epochs is not None:
                length = f"job.epochs = {config.job.epochs:g} is {counted(config.job.steps, 'step')}"
                longer = "set job.epochs to more"
            raise JobError(f"--resume: {length}, but the newest checkpoint is of step {ref.step}: {longer}")
        return tuple(found)
    raise JobError(f"--resume: no checkpoint is readable: {'; '.join(damage)}")


def is_trained(ref: CheckpointRef, config: WorkerConfig) -> bool:
    """Whether this checkpoint is of the job's last step. Imports torch."""
    from workers.checkpoint.folder import DamagedCheckpointError, read_manifest

    try:
        legs = read_manifest(ref).carried.legs
    except DamagedCheckpointError:
        return False
    return ref.step == config.course(legs).last_step(config.job.steps)


def end_at(ref: CheckpointRef, goals: Goals) -> events.Finished | None:
    """The end of the job, if the validation of this checkpoint is where `goals` end it. Imports torch."""
    from workers.checkpoint.folder import DamagedCheckpointError, read_manifest

    try:
        past = read_manifest(ref).validations
    except DamagedCheckpointError:
        return None
    reached, plateau = goals.reached(past, ref.step), goals.plateau(past, ref.step)
    end = events.Finished(step=ref.step, stopped=False, state_sha256=None, reached=reached, plateau=plateau)
    return end if end.why else None


def undamaged(ref: CheckpointRef) -> bool:
    """Whether every file of the checkpoint is intact; reads them all. Imports torch."""
    from workers.checkpoint.folder import DamagedCheckpointError, read_layer, read_manifest

    try:
        manifest = read_manifest(ref)
        for layer in range(len(manifest.layers)):
            read_layer(ref, manifest, layer)
    except DamagedCheckpointError:
        return False
    return True


def _content(path: Path) -> bytes:
    """Content of the file; empty if there is none."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
