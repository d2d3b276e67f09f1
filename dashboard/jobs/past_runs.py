"""Past runs: read from their folders, with no cluster. A folder that is still written, or half written, is read as far
as it goes. Read again when its log has grown."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from orchestrator.client.errors import JobError, NoSuchJob
from orchestrator.events.folder import EVENTS, MARKER, JobFolder
from orchestrator.history.folder_view import view_in
from orchestrator.history.job_view import JobView

KEPT_VIEWS = 16
MOST_RUNS = 1_000
"""Runs that are listed."""


@dataclass(frozen=True)
class PastRun:
    """A run's folder."""

    name: str
    """How pages and routes name it: its path below the folder of runs, with `~` for `/`. If another folder has a run of
    that name, with as many names of folders before it as tell the runs apart."""
    path: Path


class PastRuns:
    """The runs in `folders`; each folder is one, or holds some up to two levels below."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._views: OrderedDict[Path, tuple[tuple[float, int], JobView]] = OrderedDict()
        self._lock = threading.Lock()
        """Held briefly, for the two dictionaries."""
        self._reading: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
        """A lock lasts as long as someone reads or waits."""

    def runs(self) -> list[PastRun]:
        """All runs, by name. Reads directories."""
        found: dict[Path, tuple[str, Path]] = {}
        for folder in self._folders:
            for name, above, path in _runs_in(folder):
                found.setdefault(path, (name, above))
        runs = [PastRun(name, path) for path, name in _told_apart(found).items()]
        return sorted(runs, key=lambda run: run.name)

    def find(self, name: str) -> PastRun:
        """The run called `name`.

        Raises:
            NoSuchJob: there is none; only listed names are looked up, never paths.
        """
        runs = self.runs()
        for run in runs:
            if run.name == name:
                return run
        listed = ", ".join(run.name for run in runs[:10]) or "none"
        raise NoSuchJob(f"there is no run {name!r}; there is: {listed}")

    def view(self, run: PastRun) -> JobView:
        """The view of a run. Reads its log, in the calling thread.

        Raises:
            JobError: it has no log, or a damaged one; says at which line.
        """
        log = run.path / EVENTS
        try:
            state = log.stat()
        except OSError as error:
            raise JobError(
                f"{run.name} has no event log yet: {log} cannot be read ({error.strerror})"
            ) from error
        key = (state.st_mtime, state.st_size)
        with self._lock:
            reading = self._reading.setdefault(run.path, threading.Lock())
        with reading:  # a log is read once at a time, and others meanwhile
            with self._lock:
                known = self._views.get(run.path)
                if known is not None and known[0] == key:
                    self._views.move_to_end(run.path)
                    return known[1]
            view = view_in(JobFolder(str(run.path)))
            with self._lock:
                self._views[run.path] = key, view
                if len(self._views) > KEPT_VIEWS:
                    self._views.popitem(last=False)
            return view


def _runs_in(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """(name, the folder above what is named, path) of each run in `folder`."""
    if _is_run(folder):
        yield folder.name, folder.parent, folder
        return
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if _is_run(path):
            yield "~".join(path.relative_to(folder).parts), folder, path


def _told_apart(found: dict[Path, tuple[str, Path]]) -> dict[Path, str]:
    """Path -> name, each name once.

    Args:
        found: path -> (name, the folder above what is named).
    """
    names = {path: name for path, (name, _) in found.items()}
    above = {path: folder for path, (_, folder) in found.items()}
    while True:
        counts = Counter(names.values())
        same = [path for path, name in names.items() if counts[name] > 1 and above[path].name]
        if not same:
            return names
        for path in same:
            names[path] = f"{above[path].name}~{names[path]}"
            above[path] = above[path].parent


def _is_run(path: Path) -> bool:
    return (path / EVENTS).is_file() or (path / MARKER).is_file()
