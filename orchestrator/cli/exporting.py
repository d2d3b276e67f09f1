"""Runs `freshet export`: checks the target, then writes a run's weights there, into a file or a folder."""

from __future__ import annotations

import stat
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from planner.wording import counted
from workers.protocol.errors import DamagedCheckpoint, JobError

ONE_FILE = "safetensors"
"""The format of one file; any other is the family of the model."""


def export_command(
    run: str, out: str, *, force: bool, dtype: str | None = None, merge: bool = False, best: bool = False
) -> list[str]:
    """Write the weights of the run in folder `run` to `out`. Return lines for the user.

    Raises:
        JobError: there is no checkpoint, `out` must not or cannot be written, or a `dtype` or `merge` is given: one
            file keeps what a job can begin with.
    """
    from workers.checkpoint.folder import export

    if dtype is not None or merge:
        option = "--merge" if merge else f"--dtype {dtype}"
        raise JobError(f"{option} belongs to a folder: add --format and the model's family, or leave it out")
    if "://" not in out:
        check_target(Path(out), force=force)
    lines: list[str] = []

    def skip(damage: DamagedCheckpoint) -> None:
        lines.append(f"skipped {damage.path}: {damage.file} {damage.problem}")

    try:
        step, tensors, size = export(run, out, skip, best=best)
    except OSError as error:
        raise JobError(f"cannot write {out}: {error.strerror or error}") from error
    return [*lines, f"wrote {out}: {counted(tensors, 'tensor')} of step {step}, {counted(size, 'byte')}"]


def export_folder_command(
    run: str, out: str, *, format: str, dtype: str | None, merge: bool = False, best: bool = False
) -> list[str]:
    """Write the model of the run in folder `run` into the folder `out`, as the library that defines it does. Return
    lines for the user.

    Args:
        format: the model's family.
        merge: as in `ModelFamily.write_folder`.
        best: as in `from_newest`.

    Raises:
        JobError: there is no checkpoint, its model is of another family or no other library defines it, or `out` must
            not or cannot be written.
    """
    from workers.checkpoint.folder import from_newest, read_weights_and_buffers
    from workers.checkpoint.manifest import Manifest
    from workers.models.model_config import model_section
    from workers.protocol.orders import CheckpointRef

    lines: list[str] = []

    def write(ref: CheckpointRef, manifest: Manifest) -> tuple[int, tuple[int, int, tuple[str, ...]]]:
        model = model_section(manifest.spec["model"])
        if format != model.family:
            raise JobError(
                f"--format {format} is neither {ONE_FILE} nor the family of the run's model,"
                f" {model.family or 'which a factory made'}: use --format"
                f" {model.family if model.has_library else ONE_FILE}"
            )
        if merge and model.lora is None:
            raise JobError("--merge: the run's model has no adapters (model.lora): leave it out")
        if labels := manifest.spec.get("data", {}).get("labels"):
            model = model.with_labels(labels)
        read = partial(read_weights_and_buffers, ref, manifest)
        return manifest.step, model.write_folder(read, Path(out), dtype, merge=merge)

    def skip(damage: DamagedCheckpoint) -> None:
        lines.append(f"skipped {damage.path}: {damage.file} {damage.problem}")

    if "://" in out:
        raise JobError(f"--out {out} is a URI, and the folder is written on a file system: name a folder")
    try:
        step, (tensors, size, beside) = from_newest(run, write, skip, best=best)
    except OSError as error:
        raise JobError(f"cannot write {out}: {error.strerror or error}") from error
    copied = f", with {', '.join(beside)}" if beside else ""
    return [
        *lines,
        f"wrote {out}: {counted(tensors, 'tensor')} of step {step}, {counted(size, 'byte')}{copied}",
    ]


def check_target(out: Path, *, force: bool) -> None:
    """Raises:
    JobError: `out` is no regular file, or holds something other than tensors and `force` is not set.
    """
    try:
        mode = out.stat().st_mode
    except OSError:  # there is none, or writing will say what is wrong
        return
    if not stat.S_ISREG(mode):
        raise JobError(f"--out {out} is no regular file: name a file to write")
    if not force and not _holds_tensors(out):
        raise JobError(
            f"--out {out} exists and is no safetensors file: name another one, or replace it with --force"
        )


def _holds_tensors(file: Path) -> bool:
    try:
        with safe_open(file, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False
