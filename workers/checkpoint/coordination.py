"""Checkpoints of a running job: every rank writes its layers in the background, checksums travel in later
commits, and the first rank writes the manifest once it has all of them. Knows the commit records, not the
training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from planner.codec import from_json, json_values, to_json
from planner.plan import Plan
from workers.checkpoint.folder import checkpoint_folder, discard, drop_shared, prune, write_manifest
from workers.checkpoint.frozen_layers import FrozenLayers
from workers.checkpoint.kept_files import check_kept
from workers.checkpoint.manifest import FileRecord, Manifest, kept_folder, layer_files
from workers.checkpoint.storage import join
from workers.checkpoint.writer import CheckpointWriter, WriteResult
from workers.commit.commit import CommitRecord
from workers.commit.unfinished import Unfinished
from workers.config import DataConfig, FreezeConfig, OptimizerConfig, WorkerConfig
from workers.fault_injection.points import FaultPhase, FaultPoints
from workers.models.model_config import of_one_family
from workers.protocol.carried import Carried
from workers.protocol.goals import PastValidation
from workers.protocol.orders import Generation
from workers.protocol.reports import CheckpointReport, Report
from workers.state.layer_state import LayerState
from workers.state.stored_moments import StoredMoments
from workers.transport.channel import Channel

Files = dict[str, dict[str, list[int | str]]]
Copies = Callable[[Callable[[LayerState], bool]], list[LayerState]]


ROUND_S = 0.05
"""Seconds between two rounds of asking slow writers."""


class Checkpointing:
    """One rank's part in the checkpoints of a generation.

    Args:
        names: the names of all the model's layers, in order.
        plan: the plan in force, for the manifest.
        report: receives a `CheckpointReport` per checkpoint, on the first rank.
        faults: the drills armed on this rank.
        left: what an earlier generation left unfinished.
        log_sha256: returns the hash of a line of the event log for the manifest, if one is known.
    """

    def __init__(
        self,
        config: WorkerConfig,
        names: tuple[str, ...],
        plan: Plan,
        generation: Generation,
        report: Callable[[Report], None],
        faults: FaultPoints | None = None,
        left: Unfinished | None = None,
        log_sha256: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config = config
        self._names = names
        self.plan = plan
        """The plan in force, for the manifest."""
        self._generation = generation
        self._report = report
        self._faults = faults
        self._log_sha256 = log_sha256
        self._writer = CheckpointWriter(faults)
        self._frozen = FrozenLayers()
        self._finished: list[WriteResult] = []
        self._expected = {file for i, name in enumerate(names) for file in layer_files(i, name)}
        self._steps: dict[str, int] = {}
        self._carried: dict[str, Carried] = {}
        self._files: dict[str, dict[str, FileRecord]] = {}
        self._failed: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._seen: dict[str, set[str]] = {}
        self._shared: dict[str, dict[str, FileRecord]] = {}
        self._state_files = {layer_files(i, name)[1]: i for i, name in enumerate(names)}
        self._new_whole: dict[int, StoredMoments] = {}
        self._nearly_whole = 0
        self._dropped: set[str] = set()
        self._under_way: set[str] = set()
        """Folders of checkpoints that this rank, if it is the first one, has still to complete."""
        self._unnamed: set[str] = set()
        """Shared files that deleted checkpoints named."""
        self.validations: tuple[PastValidation, ...] = ()
        """The job's validations so far."""
        self.begun = left.begun if left is not None else 0
        """Step of the newest checkpoint begun, in this generation or an earlier one."""
        self.whole = left.whole if left is not None else 0
        """Step of the newest checkpoint that is complete for certain, as far as this rank can know."""

    def start(self, step: int, copies: Copies, carried: Carried) -> None:
        """Begin the checkpoint of `step`; waits only for the one before.

        Args:
            copies: returns host copies of the layers that this rank is to write; those of which it asks and learns that
                their files are there may be left out.
            carried: what the next step follows.
        """
        folder = checkpoint_folder(self._config.job.folder, step, self._generation.number)
        if folder in self._steps:
            return
        self._steps[folder] = self.begun = step
        self._under_way.add(folder)
        self._carried[folder] = carried
        self._take(self._writer.wait())
        there: list[FileRecord] = []
        prefix = carried.prefix.layers

        def written(state: LayerState) -> bool:
            files = self._frozen.files_of(state) if state.layer < prefix else ()
            there.extend(files)
            return bool(files)

        layers = copies(written)
        self._frozen.begin(layers, prefix)
        if layers or there:
            self._writer.start(folder, step, layers, prefix, there)

    def finished_files(self) -> tuple[Files, dict[str, float], dict[str, str]]:
        """Files that this rank finished since the last call, how long that took, and errors, each by folder. To be
        called before each commit."""
        self._take(self._writer.poll())
        self._drop_unnamed()
        files: Files = {}
        seconds: dict[str, float] = {}
        errors: dict[str, str] = {}
        for result in self._finished:
            seconds[result.folder] = result.seconds
            if result.error is not None:
                errors[result.folder] = result.error
            else:
                files[result.folder] = {record.name: record.told for record in result.records}
        self._finished = []
        return files, seconds, errors

    def observe(self, records: Sequence[CommitRecord], rank: int) -> str | None:
        """Record what all ranks finished. The first rank completes checkpoints; returns its newest error."""
        self._look_for_whole(records)
        if any(record.files_errors for record in records):
            self._frozen.forget()
        if rank != 0:
            return None
        for record in records:
            for folder, files in record.files.items():
                mine = self._files.setdefault(folder, {})
                for name, told in files.items():
                    mine[name] = FileRecord.heard(name, told)
            for folder, took_s in record.files_s.items():
                self._seconds[folder] = max(took_s, self._seconds.get(folder, 0.0))
            fresh = record.files_errors.keys() - self._dropped
            self._failed.update({folder: record.files_errors[folder] for folder in fresh})
        error = None
        for folder in sorted({*self._files, *self._failed}):
            if folder in self._failed:
                error = self._failed[folder]
                self._drop(folder, error)
            elif self._files[folder].keys() == self._expected:
                error = self._complete(folder)
        return error

    def finish(self, channel: Channel, rank: int, step: int) -> str | None:
        """Wait until the checkpoint of the last step is complete, on every rank.

        Returns:
            Why it could not be written; the same on every rank.
        """
        # In rounds: a slow disk may take longer than a collective's timeout.
        while any(channel.all_gather(b"busy" if self._writer.running else b"")):
            time.sleep(ROUND_S)
        self._take(self._writer.wait())
        files, seconds, errors = self.finished_files()
        record = CommitRecord(
            rank=rank,
            generation=self._generation.number,
            step=step,
            files=files,
            files_s=seconds,
            files_errors=errors,
        )
        records = [from_json(CommitRecord, r) for r in channel.all_gather(to_json(record))]
        error = self.observe(records, rank)
        self._drop_unnamed()
        return channel.all_gather((error or "").encode())[0].decode() or None

    def shared_moments(self) -> dict[int, StoredMoments]:
        """Layer -> the file of its moments, of the frozen layers in a checkpoint that has become complete since the
        last call; none that lies at a URI."""
        found, self._new_whole = self._new_whole, {}
        return found

    def close(self, *, wait: bool) -> None:
        """End the writing thread once its present write is done; `wait` blocks until then."""
        self._writer.close(wait=wait)

    def _look_for_whole(self, records: Sequence[CommitRecord]) -> None:
        # The first rank writes the manifest between the commit with the last file and the next commit, which
        # says if it failed.
        if any(self._steps.get(folder) == self._nearly_whole for r in records for folder in r.files_errors):
            self._nearly_whole = 0
        if self._nearly_whole > self.whole:
            self._note_whole(self._nearly_whole)
        self.whole = max(self.whole, self._nearly_whole)
        for record in records:
            for folder, files in record.files.items():
                seen = self._seen.setdefault(folder, set())
                seen.update(files)
                for name in files.keys() & self._state_files.keys():
                    if (heard := FileRecord.heard(name, files[name])).shared:
                        self._shared.setdefault(folder, {})[name] = heard
                if seen == self._expected and folder in self._steps:
                    self._nearly_whole = self._steps[folder]

    def _note_whole(self, step: int) -> None:
        """The checkpoint of `step` is complete: note where layers have their moments that were frozen in all
        checkpoints since. One in which they were not frees their files."""
        since = [folder for folder, begun in self._steps.items() if begun >= step]
        frozen = min((self._carried[folder].prefix.layers for folder in since), default=0)
        done = [folder for folder in self._shared if self._steps.get(folder, 0) <= step]
        for folder, records in ((folder, self._shared.pop(folder)) for folder in done):
            if self._steps.get(folder) == step and "://" not in folder:
                self._new_whole = {
                    layer: StoredMoments(
                        path=join(kept_folder(folder), record.kept_files[0].name),
                        bytes=record.bytes,
                        sha256=record.sha256,
                    )
                    for name, record in records.items()
                    if (layer := self._state_files[name]) < frozen
                }

    def _take(self, result: WriteResult | None) -> None:
        if result is not None:
            self._finished.append(result)
            self._frozen.end(result.records)

    def _complete(self, folder: str) -> str | None:
        files = self._files.pop(folder)
        step = self._steps[folder]
        try:
            if self._faults is not None:
                self._faults.reach(FaultPhase.SAVING, step)
            number, carried = self._generation.number, self._carried[folder]
            log = self._log_sha256()
            past, unnamed = self.validations, self._unnamed
            seal(
                self._config, self._names, self.plan, folder, step, number, files, carried, log, past, unnamed
            )
        except OSError as error:
            self._drop(folder, str(error))
            self._take(
                WriteResult(folder=folder, step=step, records=(), bytes=0, seconds=0.0, error=str(error))
            )
            return str(error)
        self._under_way.discard(folder)
        self._tell(folder, sum(file.written_bytes for file in files.values()), None)
        return None

    def _drop(self, folder: str, error: str) -> None:
        # The other ranks' files go with the checkpoint; the next prune deletes what a rank still writes into
        # it.
        self._files.pop(folder, None)
        self._failed.pop(folder, None)
        self._dropped.add(folder)
        self._under_way.discard(folder)
        with suppress(OSError):
            discard(folder)
        self._tell(folder, 0, error)

    def _drop_unnamed(self) -> None:
        """Delete shared files that no checkpoint names any more, once none is under way that may have found them there:
        no rank has passed a commit that this one has not."""
        if self._unnamed and not self._under_way:
            unnamed, self._unnamed = self._unnamed, set()
            with suppress(OSError):
                drop_shared(self._config.job.folder, unnamed)

    def _tell(self, folder: str, size: int, error: str | None) -> None:
        self._report(
            CheckpointReport(
                step=self._steps[folder],
                path=folder,
                bytes=size,
                seconds=self._seconds.get(folder, 0.0),
                error=error,
            )
        )


def seal(
    config: WorkerConfig,
    names: tuple[str, ...],
    plan: Plan,
    folder: str,
    step: int,
    generation: int,
    files: Mapping[str, FileRecord],
    carried: Carried,
    log_sha256: str | None,
    validations: Sequence[PastValidation] = (),
    unnamed: set[str] | None = None,
) -> None:
    """Complete the checkpoint at `folder`, and delete checkpoints that are too old.

    Args:
        log_sha256: as in `Manifest`.
        validations: the job's so far, some perhaps of later steps.
        unnamed: as for `prune`.

    Raises:
        OSError: the file system refused, or a file that it shares with other checkpoints is gone.
    """
    manifest = Manifest(
        step=step,
        generation=generation,
        spec=config.model_dump(mode="json"),
        plan=json_values(plan),
        layers=names,
        samples=config.course(carried.legs).taken(step),
        files=files,
        carried=carried,
        log_sha256=log_sha256,
        validations=tuple(_finite(each) for each in validations if each.step <= step),
    )
    check_kept(folder, files.values())
    write_manifest(folder, manifest)
    # If an old checkpoint cannot be deleted now, the next call tries again.
    with suppress(OSError):
        prune(config.job.folder, config.checkpoint.keep, config.checkpoint.keep_best, unnamed)


def _finite(validation: PastValidation) -> PastValidation:
    """`validation` without what JSON has no number for."""
    values = {name: value for name, value in validation.values.items() if math.isfinite(value)}
    return PastValidation(step=validation.step, values=values)


_TRAJECTORY: Mapping[str, tuple[str, ...]] = {
    "job": ("seed", "precision", "threads", "compile"),
    "pipeline": ("microbatch_size", "microbatches", "replicas"),
    "model": (),
    "data": (),
    "optimizer": (),
    "freeze": (),
}
"""Section -> its keys that determine the trajectory; none named: all."""


def manifest_mismatch(
    manifest: Manifest, config: WorkerConfig, shard: str = "none"
) -> Mapping[str, tuple[object, object]]:
    """The settings that determine the trajectory and differ: dotted key -> (in the checkpoint, now).

    Args:
        shard: as in `Plan`, now.
    """
    before, now = dict(manifest.spec), config.model_dump(mode="json")
    before["model"] = of_one_family(before.get("model", {}))
    # A key that an earlier version did not have: what that did is its default.
    for section, defaults in (
        ("data", DataConfig()),
        ("optimizer", OptimizerConfig()),
        ("freeze", FreezeConfig()),
    ):
        before[section] = {**defaults.model_dump(mode="json"), **before.get(section, {})}
    for spec in (before, now):
        spec["data"]["shuffle"] = spec["data"]["shuffle"] or "permutation"
    if before["freeze"]["method"] == now["freeze"]["method"]:
        # The method ignores the other freezing settings.
        for spec in (before, now):
            spec["freeze"] = {key: spec["freeze"].get(key) for key in config.freeze.used}
    differing: dict[str, tuple[object, object]] = {}
    sharded = str(manifest.plan.get("shard", "none"))
    if sharded != shard and "gradients" in (sharded, shard):
        differing["pipeline.shard"] = (sharded, shard)
    device = before.get("cluster", {}).get("device")
    if (device == "cuda") != (config.device == "cuda"):
        differing["cluster.device"] = (device, config.device)
    for section, keys in _TRAJECTORY.items():
        old, new = before.get(section, {}), now[section]
        for key in keys or sorted({*old, *new}):
            if old.get(key) != new.get(key):
                differing[f"{section}.{key}"] = (old.get(key), new.get(key))
    return differing
