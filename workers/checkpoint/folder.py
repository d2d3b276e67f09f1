"""Checkpoints on disk: a folder per step and generation, two safetensors files per layer, the manifest last. What
training does not change, fixed parameters and frozen layers, lies in a folder beside them, `kept`, once for all
checkpoints.

A folder without a manifest is not a checkpoint. Nothing is ever unpickled. Knows no rank and no thread:
`workers/checkpoint/writer.py` writes in the background.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from workers.checkpoint.kept_files import KeptFiles, names_of, prune_kept
from workers.checkpoint.manifest import FileRecord, KeptFile, Manifest, kept_folder, layer_files
from workers.checkpoint.manifest import checkpoint_folder as checkpoint_folder
from workers.checkpoint.storage import Folder, join, open_folder, split
from workers.protocol.carried import Carried
from workers.protocol.errors import DamagedCheckpoint, JobError
from workers.protocol.orders import CheckpointRef
from workers.protocol.target import better
from workers.state.layer_state import (
    FixedFile,
    LayerState,
    digest_of,
    file_of_fixed,
    fresh,
    record_of_fixed,
    with_moments,
)
from workers.state.precision import scales_loss
from workers.state.stored_moments import FREEZING, METADATA, StateFile, tensors_of

Used = TypeVar("Used")
_MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"step-(\d{8,})-gen-(\d+)")


class DamagedCheckpointError(JobError):
    """A checkpoint that cannot be used: `damage` says which file, and what is wrong with it."""

    def __init__(self, damage: DamagedCheckpoint) -> None:
        super().__init__(damage)
        self.damage = damage

    def __str__(self) -> str:
        return f"checkpoint {self.damage.path} is damaged: {self.damage.file} {self.damage.problem}"


def write_layer(folder: str, state: LayerState, frozen: KeptFiles | None = None) -> tuple[FileRecord, ...]:
    """Write the two files of a layer.

    Args:
        folder: the checkpoint's location.
        state: a host copy that nobody changes in the meantime, with its fixed parameters.
        frozen: where given, the layer is frozen: its files go there, unless they are there.

    Raises:
        OSError: the file system refused; files already written stay.
        JobError: safetensors does not support a tensor's dtype.
        MomentsLost: its moments lie in a file that this checkpoint cannot name, and it cannot be read.
    """
    weights_file, _ = layer_files(state.layer, state.name)
    moving = {name: tensor for name, tensor in state.weights.items() if name not in state.fixed_names}
    kept, new_bytes = _keep_fixed(folder, state) if state.fixed_names else (None, 0)
    about = {"buffers": sorted(state.buffers)}
    weights = _write(folder, weights_file, {**moving, **state.buffers}, about, frozen)
    return (
        replace(weights, kept=kept, written_bytes=weights.written_bytes + new_bytes),
        _write_rest(folder, state, frozen),
    )


def _write_rest(folder: str, state: LayerState, frozen: KeptFiles | None) -> FileRecord:
    """Write the file of optimizer state and freezing statistics, unless they lie in one that the checkpoint can
    name."""
    _, file = layer_files(state.layer, state.name)
    if (stored := state.stored) is not None:
        kept = KeptFile(bytes=stored.bytes, sha256=stored.sha256)
        its_folder = stored.path == join(kept_folder(folder), kept.name)
        if frozen is not None and its_folder and stored.statistics == digest_of(state.freezing):
            return FileRecord(name=file, bytes=kept.bytes, sha256=kept.sha256, shared=True)
        state = with_moments(state)
    slots = {
        f"{slot}.{parameter}": tensor
        for parameter, tensors in state.slots.items()
        for slot, tensor in tensors.items()
    }
    statistics = {f"{FREEZING}{key}": tensor for key, tensor in state.freezing.items()}
    return _write(folder, file, {**slots, **statistics}, {"updates": state.updates}, frozen)


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Complete the checkpoint in `folder`. Call it when every file of `manifest` is written.

    Raises:
        OSError: the file system refused; the checkpoint is incomplete: `discard` it.
    """
    open_folder(folder).write(_MANIFEST, manifest.to_json().encode())


def checkpoints(output: str) -> list[CheckpointRef]:
    """The checkpoints with a manifest in the job folder `output`, newest first."""
    return [
        CheckpointRef(path=checkpoint_folder(output, step, generation), step=step)
        for step, generation in _by_age(output, whole=True)
    ]


def read_manifest(ref: CheckpointRef) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, altered, not JSON, or of another format or checkpoint.
    """
    try:
        manifest = Manifest.from_json(_read(open_folder(ref.path), ref, _MANIFEST).decode())
    except UnicodeDecodeError as error:
        raise _damaged(ref, _MANIFEST, "is not UTF-8 text") from error
    except ValueError as error:
        raise _damaged(ref, _MANIFEST, str(error)) from error
    named = _FOLDER_NAME.fullmatch(split(ref.path)[1])
    if named is not None and (manifest.step, manifest.generation) != (int(named[1]), int(named[2])):
        problem = f"is of step {manifest.step}, generation {manifest.generation}: the folder was renamed"
        raise _damaged(ref, _MANIFEST, problem)
    return manifest


def manifest_sha256(ref: CheckpointRef) -> str:
    """The sha256 (hex) of a checkpoint's manifest, which tells those of all its files.

    Raises:
        DamagedCheckpointError: as `read_manifest`.
    """
    read_manifest(ref)
    return hashlib.sha256(_read(open_folder(ref.path), ref, _MANIFEST)).hexdigest()


def read_carried(ref: CheckpointRef, precision: str) -> Carried:
    """State besides layers that the step after a checkpoint follows.

    Raises:
        DamagedCheckpointError: it cannot be read, or has no loss scale, and `precision` needs one.
    """
    carried = read_manifest(ref).carried
    if not scales_loss(precision):
        return replace(carried, loss_scale=None)
    if carried.loss_scale is None:
        raise _damaged(ref, _MANIFEST, f'has no loss scale, which job.precision = "{precision}" needs')
    return carried


def read_layer(
    ref: CheckpointRef, manifest: Manifest, layer: int, built: LayerState | None = None
) -> LayerState:
    """The state of one layer, in fresh CPU allocations, after verifying the checksums of its files.

    Args:
        built: a state of the layer; fixed parameters that it has are left out, and their file is not read.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or altered.
    """
    name = manifest.layers[layer]
    weights_file, state_file = layer_files(layer, name)
    record = manifest.files[weights_file]
    here = built is not None and record.kept is not None and _kept_of(built) == record.kept
    tensors, about_weights = _read_tensors(ref, record)
    fixed = {} if here else _read_fixed(ref, record)
    slot_tensors, about_state = _read_tensors(ref, manifest.files[state_file])
    buffers = set(about_weights["buffers"])
    rest = StateFile.of(slot_tensors, about_state)
    return LayerState(
        layer=layer,
        name=name,
        weights={**{key: tensor for key, tensor in tensors.items() if key not in buffers}, **fixed},
        buffers={key: tensor for key, tensor in tensors.items() if key in buffers},
        slots=rest.slots,
        updates=rest.updates,
        freezing=rest.freezing,
        fixed_names=built.fixed_names if built is not None and here else frozenset(fixed),
        fixed_file=FixedFile() if record.kept is None else FixedFile(record.kept.bytes, record.kept.sha256),
    )


def prune(
    output: str, keep: int, keep_best: str | None = None, unnamed: set[str] | None = None
) -> tuple[str, ...]:
    """Delete all but the newest `keep` checkpoints and the one with the best value of the metric `keep_best`, and
    abandoned ones older than the newest.

    Nothing else in the folder is touched. Returns the locations of the deleted checkpoints.

    Args:
        unnamed: receives the names of the shared files that these named, for `drop_shared` once no checkpoint is being
            written: one may have found them there. None: they are deleted at once.
    """
    whole = _by_age(output, whole=True)
    if not whole:
        return ()
    kept = set(whole[:keep])
    if keep_best is not None:
        best = best_checkpoint(output, keep_best)
        kept |= {key for key in whole if checkpoint_folder(output, *key) == best}
    doomed = [key for key in _by_age(output, whole=False) if _age(key) < _age(whole[0]) and key not in kept]
    folders = tuple(checkpoint_folder(output, *key) for key in doomed)
    dropped = _named(CheckpointRef(path=checkpoint_folder(output, *key), step=key[0]) for key in doomed)
    for folder in folders:
        discard(folder)
    if unnamed is None:
        drop_shared(output, dropped)
    else:
        unnamed |= dropped
    return folders


def drop_shared(output: str, unnamed: Collection[str]) -> None:
    """Delete the shared files of the job folder `output` that no checkpoint names: those `unnamed` by the checkpoints
    that did, and what killed writers left long ago."""
    with suppress(DamagedCheckpointError):  # one may name any of them
        if whole := checkpoints(output):
            prune_kept(whole[0].path, _named(whole, strict=True), unnamed)


def best_checkpoint(output: str, metric: str) -> str | None:
    """Location of the checkpoint of the job folder `output` with the best value of `metric`, the newest of equal ones;
    None where none has one."""
    best: tuple[str, float] | None = None
    for ref in checkpoints(output):
        try:
            value = read_manifest(ref).metrics.get(metric)
        except DamagedCheckpointError:
            continue
        if value is not None and better(metric, value, None if best is None else best[1]):
            best = (ref.path, value)
    return None if best is None else best[0]


def _named(refs: Iterable[CheckpointRef], *, strict: bool = False) -> frozenset[str]:
    """Names of the shared files of the checkpoints that can be read; `strict`: of all of them.

    Raises:
        DamagedCheckpointError: `strict`, and one cannot be read.
    """
    names = frozenset[str]()
    for ref in refs:
        try:
            names |= names_of(read_manifest(ref).files.values())
        except DamagedCheckpointError:
            if strict:
                raise
    return names


def discard(folder: str) -> None:
    """Delete a checkpoint, complete or not. Does nothing if there is none.

    Raises:
        OSError: its manifest cannot be deleted, so it is still a checkpoint.
    """
    target = open_folder(folder)
    # The manifest first: half a checkpoint must not pass for a complete one.
    target.remove(_MANIFEST)
    # Another rank may still be writing into it. The remainder is not a checkpoint, and a later prune deletes
    # it.
    with suppress(OSError):
        target.delete()


def from_newest(
    output: str,
    use: Callable[[CheckpointRef, Manifest], Used],
    on_damaged: Callable[[DamagedCheckpoint], None] | None = None,
    *,
    best: bool = False,
) -> Used:
    """The result of `use` for the newest undamaged checkpoint of the job folder `output`.

    Args:
        use: called with one after the other, until it finds none of its files damaged.
        on_damaged: called with each damaged checkpoint, which is skipped for the one before it.
        best: instead for the best one, by the metric of `checkpoint.keep_best`.

    Raises:
        JobError: there is no undamaged checkpoint, or the job keeps no best one.
    """
    damage: list[str] = []
    for ref in _best(output) if best else checkpoints(output):
        try:
            return use(ref, read_manifest(ref))
        except DamagedCheckpointError as error:
            damage.append(str(error))
            if on_damaged is not None:
                on_damaged(error.damage)
    if damage:
        raise JobError(f"no checkpoint of {output} can be exported: {'; '.join(damage)}")
    raise JobError(f"{output} holds no checkpoint: set checkpoint.every_steps, or train to the end")


def _best(output: str) -> list[CheckpointRef]:
    """Raises JobError where the job keeps no best checkpoint."""
    found = checkpoints(output)
    for ref in found:
        try:
            metric = read_manifest(ref).spec.get("checkpoint", {}).get("keep_best")
        except DamagedCheckpointError:
            continue
        path = None if metric is None else best_checkpoint(output, metric)
        if path is None:
            break
        return [ref for ref in found if ref.path == path]
    raise JobError(
        f"--best: no checkpoint of {output} tells a metric: set checkpoint.keep_best and job.validate_every"
    )


def export(
    output: str,
    out_file: str,
    on_damaged: Callable[[DamagedCheckpoint], None] | None = None,
    *,
    best: bool = False,
) -> tuple[int, int, int]:
    """Write the weights and buffers of the newest undamaged checkpoint into one safetensors file.

    Keys are `layer.parameter`; a tied parameter appears once for each layer that holds it. The metadata names
    the step and the job. The entire model passes through host memory.

    Args:
        output: the job's folder.
        out_file: path or URI of the file to write, atomically.
        on_damaged, best: as in `from_newest`.

    Returns:
        (step, number of tensors, bytes of the file).

    Raises:
        JobError: there is no undamaged checkpoint.
        OSError: the file cannot be written.
    """

    def write(ref: CheckpointRef, manifest: Manifest) -> tuple[int, int, int]:
        tensors = {
            f"{name}.{key}": tensor
            for layer, name in enumerate(manifest.layers)
            for key, tensor in read_weights_and_buffers(ref, manifest, layer).items()
        }
        folder, file = split(out_file)
        data = save(tensors, {"format": "pt", "step": str(manifest.step), "name": _job_name(manifest)})
        open_folder(folder).write(file, data)
        return manifest.step, len(tensors), len(data)

    return from_newest(output, write, on_damaged, best=best)


def read_weights_and_buffers(ref: CheckpointRef, manifest: Manifest, layer: int) -> dict[str, Tensor]:
    """The weights and buffers of one layer, after verifying the checksum of their file.

    Raises:
        DamagedCheckpointError: it is missing, truncated or altered.
    """
    weights_file, _ = layer_files(layer, manifest.layers[layer])
    record = manifest.files[weights_file]
    return {**_read_tensors(ref, record)[0], **_read_fixed(ref, record)}


def _by_age(output: str, *, whole: bool) -> list[tuple[int, int]]:
    """(step, generation) of the checkpoints in `output`, newest first.

    A later generation is newer, whatever its steps: it may have resumed from before a damaged checkpoint.

    Args:
        whole: only complete checkpoints, those with a manifest.
    """
    parent = open_folder(join(output, "checkpoints"))
    found: list[tuple[int, int]] = []
    for name in parent.names():
        match = _FOLDER_NAME.fullmatch(name)
        if match is not None and (not whole or parent.child(name).exists(_MANIFEST)):
            found.append((int(match[1]), int(match[2])))
    return sorted(found, key=_age, reverse=True)


def _age(key: tuple[int, int]) -> tuple[int, int]:
    step, generation = key
    return generation, step


def _write(
    location: str, file: str, tensors: dict[str, Tensor], about: dict[str, Any], frozen: KeptFiles | None
) -> FileRecord:
    with _storable(file, tensors):
        data = save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            {METADATA: json.dumps(about, sort_keys=True)},
        )
    if frozen is not None:
        kept, new = frozen.keep(location, data)
        written = kept.bytes if new else 0
        return FileRecord(name=file, bytes=kept.bytes, sha256=kept.sha256, shared=True, written_bytes=written)
    open_folder(location).write(file, data)
    sha256 = hashlib.sha256(data).hexdigest()
    return FileRecord(name=file, bytes=len(data), sha256=sha256, written_bytes=len(data))


@contextmanager
def _storable(file: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    try:
        yield
    except (KeyError, SafetensorError) as error:
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise JobError(f"{file} cannot hold tensors of these dtypes: {dtypes} ({error})") from error


def _keep_fixed(location: str, state: LayerState) -> tuple[KeptFile, int]:
    """Write the file of the fixed parameters, unless it is there; also returns the bytes written."""
    kept, written = _kept_of(state), 0
    if not state.fixed_file.written or open_folder(kept_folder(location)).size(kept.name) != kept.bytes:
        _, new = KeptFiles().keep(location, file_of_fixed(state))
        written = kept.bytes if new else 0
        state.fixed_file.written = True
    return kept, written


def _kept_of(state: LayerState) -> KeptFile:
    with _storable(f"the file of the fixed parameters of layer {state.name}", state.fixed):
        record = record_of_fixed(state)
    return KeptFile(bytes=record.bytes, sha256=record.sha256)


def _read_fixed(ref: CheckpointRef, record: FileRecord) -> dict[str, Tensor]:
    """The tensors of the file that a file of weights shares with those of other checkpoints; none without one."""
    kept = record.kept
    if kept is None:
        return {}
    return _read_tensors(ref, FileRecord(name=kept.name, bytes=kept.bytes, sha256=kept.sha256, shared=True))[
        0
    ]


def _read(folder: Folder, ref: CheckpointRef, file: str) -> bytes:
    try:
        return folder.read(file)
    except FileNotFoundError as error:
        raise _damaged(ref, file, "is missing") from error
    except OSError as error:
        raise _damaged(ref, file, f"cannot be read: {error.strerror or error}") from error


def _read_tensors(ref: CheckpointRef, record: FileRecord) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of one file, in fresh allocations, and the metadata written with them."""
    folder, name = open_folder(ref.path), record.name
    if record.shared:
        folder = open_folder(kept_folder(ref.path))
        name = KeptFile(bytes=record.bytes, sha256=record.sha256).name
    data = _read(folder, ref, name)
    if len(data) != record.bytes:
        raise _damaged(ref, name, f"has {len(data)} bytes, where the manifest says {record.bytes}")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise _damaged(ref, name, "was altered: its sha256 is not the manifest's")
    try:
        tensors, about = tensors_of(data)
        return {name: fresh(tensor) for name, tensor in tensors.items()}, about
    except ValueError as error:
        raise _damaged(ref, name, f"is no safetensors file of a layer: {error}") from error


def _job_name(manifest: Manifest) -> str:
    return str(manifest.spec.get("job", {}).get("name", ""))


def _damaged(ref: CheckpointRef, file: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(DamagedCheckpoint(path=ref.path, file=file, problem=problem))
