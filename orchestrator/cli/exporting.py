"""Runs `freshet export`: checks the target, then writes a run's weights there."""

from __future__ import annotations

import stat
from pathlib import Path

from safetensors import SafetensorError, safe_open

from planner.wording import counted
from workers.protocol.errors import DamagedCheckpoint, JobError


def export_command(run: str, out: str, *, force: bool) -> list[str]:
    """Write the weights of the run in folder `run` to `out`. Return lines for the user.

    Raises:
        JobError: there is no checkpoint, or `out` must not or cannot be written.
    """
    from workers.checkpoint.folder import export

    if "://" not in out:
        check_target(Path(out), force=force)
    lines: list[str] = []

    def skip(damage: DamagedCheckpoint) -> None:
        lines.append(f"skipped {damage.path}: {damage.file} {damage.problem}")

    try:
        step, tensors, size = export(run, out, skip)
    except OSError as error:
        raise JobError(f"cannot write {out}: {error.strerror or error}") from error
    return [*lines, f"wrote {out}: {counted(tensors, 'tensor')} of step {step}, {counted(size, 'byte')}"]


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
