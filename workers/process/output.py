"""Keeps what a rank's process prints in the job's folder, and reads from it how the process ended.

The process writes directly into the file, so that it holds the last lines of a process that crashes.
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
from dataclasses import dataclass
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
_MODULES = "Extension modules: "
"""Before the names of hundreds, which faulthandler adds to a stack."""
_LATE = re.compile(r"^Timeout \(.+\)!$", re.MULTILINE)
"""faulthandler's heading once a process has exceeded its time."""
_CALLS = re.compile(r"\(most recent call first\):\n((?:  File .*\n?)+)")
MOST_CALLS = 12
_SIGNALS = {
    "Segmentation fault": "SIGSEGV (segmentation fault)",
    "Aborted": "SIGABRT (aborted)",
    "Bus error": "SIGBUS (bus error)",
    "Illegal instruction": "SIGILL (illegal instruction)",
    "Floating-point exception": "SIGFPE (floating-point exception)",
    "Floating point exception": "SIGFPE (floating-point exception)",
}
"""faulthandler's name of a signal -> ours."""


def local_folder(output: str) -> Path:
    """Return the folder of the files that grow as the job runs: `job.output`, or a folder in the user's cache on this
    node where `job.output` is a URI, because such stores cannot append."""
    if "://" not in output:
        return Path(output)
    key = hashlib.sha256(output.encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "freshet" / "events" / key


def rank_log_path(output: str, rank: int) -> Path:
    """Return the file with the newest output of `rank`; `older_part` of it has the output before."""
    return local_folder(output) / LOGS / f"rank-{rank}.log"


def older_part(path: Path) -> Path:
    """Return the file with the older half of a rank's output; it exists once the newer one was full."""
    return path.with_suffix(".1.log")


def last_lines(path: Path, count: int = 20) -> tuple[str, ...]:
    """Return the last lines of the newest process that wrote to `path`; empty where there is no such file."""
    lines = _newest(path).splitlines()
    return tuple(line for line in lines if line.strip() and not line.startswith(_MODULES))[-count:]


def cause_of_death(path: Path) -> str | None:
    """Return the signal or exit code with which the newest process ended, as far as its output in `path` says."""
    text = _newest(path)
    if fatal := _FATAL.findall(text):
        name = fatal[-1].strip()
        return f"signal {_SIGNALS[name]}" if name in _SIGNALS else f"fatal error: {name}"
    if codes := _EXIT.findall(text):
        return f"exit code {codes[-1]}, by os._exit"
    return None


@dataclass(frozen=True)
class Calls:
    """The calls that a process was in as faulthandler ended it, or it crashed."""

    lines: tuple[str, ...]
    """Calls of the thread that crashed, or of the main thread; innermost first."""
    late: bool
    """Whether it was ended because it took too long."""


def innermost_calls(path: Path) -> Calls:
    """Return the calls that the newest process which wrote to `path` ended in; none where it did not say so."""
    text = _newest(path, MOST_BYTES)  # faulthandler prints up to 100 threads of 100 calls
    stacks = _CALLS.findall(text)  # the main thread's comes last
    lines = stacks[-1].splitlines() if stacks else []
    return Calls(tuple(lines[:MOST_CALLS]), _LATE.search(text) is not None)


def _newest(path: Path, most_bytes: int = TAIL_BYTES) -> str:
    """Return the last `most_bytes` of `path`, as far as the newest process wrote them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    before, begin, after = text.rpartition(_BEGIN)
    return after.partition("\n")[2] if begin and (not before or before.endswith("\n")) else text


def keep_output(output: str, rank: int, most_bytes: int = MOST_BYTES) -> Path:
    """Redirect this process's stdout and stderr to `rank_log_path`, and its stack if it crashes.

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
        # On a full disk or a deleted folder, try again at the next look.
        with suppress(OSError):
            if path.stat().st_size > part_bytes:
                path.replace(older_part(path))
                _write_to(path)


def _announced(end: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Wrap `os._exit` to print the exit code first: only Ray, the parent process, learns it otherwise."""
    process = os.getpid()

    def announce_and_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            stack = "".join(traceback.format_stack(limit=8))
            os.write(2, f"os._exit({status}) was called:\n{stack}".encode())
        end(status)

    return announce_and_exit
