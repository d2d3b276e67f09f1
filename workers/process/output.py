"""Keeps what a rank's process prints in the job's folder, and reads there how the process ended.

The process writes into the file itself, with nothing between, so that the last words of one that crashes are there.
Knows no Ray and no rank beyond its number.
"""

from __future__ import annotations

import faulthandler
import hashlib
import io
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LOGS = "logs"
MOST_BYTES = 4 * 2**20
"""Kept of one rank, in two files: the older half is dropped when the newer one is full."""
LOOK_EVERY_S = 1.0
TAIL_BYTES = 16 * 1024
_BEGIN = "--- rank "
_EXIT = re.compile(r"^os\._exit\((.*)\) was called", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV (segmentation fault)",
    "Aborted": "SIGABRT (aborted)",
    "Bus error": "SIGBUS (bus error)",
    "Illegal instruction": "SIGILL (illegal instruction)",
    "Floating-point exception": "SIGFPE (floating-point exception)",
    "Floating point exception": "SIGFPE (floating-point exception)",
}
"""By faulthandler's names for them."""


def local_folder(output: str) -> Path:
    """Where the files of the job with that `job.output` lie that grow as it runs: in its folder, or in the user's cache
    on this node where the folder is a URI, because such stores cannot append."""
    if "://" not in output:
        return Path(output)
    key = hashlib.sha256(output.encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "freshet" / "events" / key


def rank_log_path(output: str, rank: int) -> Path:
    """The file with the newest output of `rank`; what came before is in `older_part` of it."""
    return local_folder(output) / LOGS / f"rank-{rank}.log"


def older_part(path: Path) -> Path:
    """Where the older half of a rank's output is, if there is so much."""
    return path.with_suffix(".1.log")


def last_lines(path: Path, count: int = 20) -> tuple[str, ...]:
    """The last lines that the process printed which wrote to `path` last; empty where there is no such file."""
    lines = _newest(path).splitlines()
    return tuple(line for line in lines if line.strip())[-count:]


def cause_of_death(path: Path) -> str | None:
    """The signal or exit code with which that process ended, as far as its output says."""
    text = _newest(path)
    if fatal := _FATAL.findall(text):
        name = fatal[-1].strip()
        return f"signal {_SIGNALS[name]}" if name in _SIGNALS else f"fatal error: {name}"
    if codes := _EXIT.findall(text):
        return f"exit code {codes[-1]}, by os._exit"
    return None


def _newest(path: Path) -> str:
    """The end of `path`, as far as one process wrote it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    before, begin, after = text.rpartition(_BEGIN)
    return after.partition("\n")[2] if begin and (not before or before.endswith("\n")) else text


def keep_output(output: str, rank: int, most_bytes: int = MOST_BYTES) -> Path:
    """From now on this process's stdout and stderr go to `rank_log_path`; so does where it was, if it crashes.

    Raises:
        OSError: the file cannot be opened.
    """
    path = rank_log_path(output, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_to(path)
    os.write(2, f"{_BEGIN}{rank}, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # The other threads would push the one that crashed out of the last lines.
    faulthandler.enable(file=2, all_threads=False)
    os._exit = _announced(os._exit)
    threading.Thread(target=_rotate, args=(path, most_bytes // 2), name="output", daemon=True).start()
    return path


def _write_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
    finally:
        os.close(file)


def _rotate(path: Path, part_bytes: int) -> None:
    while True:
        time.sleep(LOOK_EVERY_S)
        # A full disk, or a folder that was deleted, is no reason to end: it is tried again.
        with suppress(OSError):
            if path.stat().st_size > part_bytes:
                path.replace(older_part(path))
                _write_to(path)


def _announced(end: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """`os._exit` that says so first: nobody else learns the exit code of a process whose parent is Ray's."""
    process = os.getpid()

    def announce_and_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            stack = "".join(traceback.format_stack(limit=8))
            os.write(2, f"os._exit({status}) was called:\n{stack}".encode())
        end(status)

    return announce_and_exit
