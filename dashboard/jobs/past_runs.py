"""Past runs: read from their folders, with no cluster. A folder that is still written, or half written, is read as far
as it goes. A log that has grown is read from where it was read before."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from orchestrator.client.errors import JobError, NoSuchJob
from orchestrator.history.copying import copied
from orchestrator.history.folder import EVENTS, MARKER, PLANNER, PROFILE, JobFolder
from orchestrator.history.folder_view import placed_view_in
from orchestrator.history.job_view import JobView
from orchestrator.history.snapshot import SNAPSHOT, LogPosition

log = logging.getLogger(__name__)

KEPT_VIEWS = 16
MOST_RUNS = 1_000
"""Runs that are listed, and of which `PastRuns.cached` keeps what was made."""
LEVELS = 2
"""Levels of subfolders searched for runs."""
READ = (EVENTS, SNAPSHOT, PROFILE, MARKER, PLANNER)
"""Files of a run that are read."""

T = TypeVar("T")
_State = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class PastRun:
    """A run's folder."""

    name: str
    """Name in pages and routes: the path below the folder of runs, with `~` for `/`. If another folder has a run of
    that name, preceded by as many parent folders as tell the runs apart."""
    path: Path
    root: Path
    """The folder of runs that it is in."""


@dataclass(frozen=True)
class _Kept:
    """A run as it was read."""

    state: _State
    """Fingerprint of the run's files when it was read."""
    view: JobView
    position: LogPosition | None


class PastRuns:
    """The runs in `folders`; each folder is one, or holds some up to two levels below.

    Views of the newest `KEPT_VIEWS` runs that were asked for are kept, and summaries, or what else `cached` is given to
    make, of `MOST_RUNS`, as long as their files stay as they were.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._views: OrderedDict[Path, _Kept] = OrderedDict()
        self._made: OrderedDict[Path, tuple[_State, object]] = OrderedDict()
        """(state of the files, result of `make` or its error) of each run."""
        self._left_out: set[Path] = set()
        """Links that lead out of their folder; the service's log has them."""
        self._lock = threading.Lock()
        """Held briefly, for the dictionaries."""
        self._reading: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
        """A lock lasts as long as someone reads or waits."""

    def runs(self) -> list[PastRun]:
        """All runs, by name. Reads directories."""
        found: dict[Path, tuple[str, Path]] = {}
        roots: dict[Path, Path] = {}
        for folder in self._folders:
            for name, above, path in self._runs_in(folder):
                if path not in found:
                    found[path], roots[path] = (name, above), folder
        runs = [PastRun(name, path, roots[path]) for path, name in _told_apart(found).items()]
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

    def cached(self, run: PastRun, make: Callable[[JobView], object]) -> object:
        """`make(view)` of a run, made again only when its files have changed. For one `make`. Reads the run's log then,
        in the calling thread.

        Raises:
            JobError: it has no log, or a damaged one; says at which line.
        """
        _check_inside(run)
        state = _state(run)
        with self._lock:
            known = self._made.get(run.path)
        if known is None or known[0] != state:
            try:
                known = state, _understood(run, lambda: make(self.view(run)))
            except JobError as error:
                known = state, error
            with self._lock:
                _keep(self._made, run.path, known, MOST_RUNS)
        if isinstance(known[1], JobError):
            raise JobError(str(known[1]))
        return known[1]

    def view(self, run: PastRun) -> JobView:
        """The view of a run. Reads its log, in the calling thread.

        Raises:
            JobError: it has no log, or a damaged one; says at which line.
        """
        _check_inside(run)
        log = run.path / EVENTS
        try:
            log.stat()
        except OSError as error:
            raise JobError(
                f"{run.name} has no event log yet: {log} cannot be read ({error.strerror})"
            ) from error
        with self._lock:
            reading = self._reading.setdefault(run.path, threading.Lock())
        with reading:  # a log is read once at a time, and others meanwhile
            state = _state(run)
            with self._lock:
                kept = self._views.get(run.path)
                if kept is not None and kept.state == state:
                    self._views.move_to_end(run.path)
                    return kept.view
            known = (copied(kept.view), kept.position) if kept is not None else None
            view, position = _understood(run, lambda: placed_view_in(JobFolder(str(run.path)), known))
            with self._lock:
                _keep(self._views, run.path, _Kept(state, view, position), KEPT_VIEWS)
            return view

    def _runs_in(self, folder: Path) -> Iterator[tuple[str, Path, Path]]:
        """(name, the folder above what is named, path) of each run in `folder`, each once and none outside of it."""
        if _is_run(folder):
            yield folder.name, folder.parent, folder
            return
        linked: list[tuple[Path, Path]] = []
        for shown, path, link in _folders_in(folder, LEVELS):
            if link:
                linked.append((shown, path))
            elif _is_run(path):
                yield "~".join(shown.relative_to(folder).parts), folder, path
        for shown, path in linked:
            if path.is_relative_to(folder):
                if path != folder and _is_run(path):
                    yield "~".join(shown.relative_to(folder).parts), folder, path
            elif shown not in self._left_out and len(self._left_out) < MOST_RUNS:
                self._left_out.add(shown)
                log.warning(
                    "%s is a link that leads out of %s, and is not shown: start the service with --runs %s too",
                    shown,
                    folder,
                    path,
                )


def _folders_in(folder: Path, levels: int) -> Iterator[tuple[Path, Path, bool]]:
    """(path, where it leads, whether by a link) of each folder up to `levels` below `folder`. What a link leads to is
    not looked into."""
    try:
        with os.scandir(folder) as entries:
            below = sorted(filter(_is_folder, entries), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in below:
        path = Path(entry.path)
        if entry.is_symlink():
            yield path, Path(os.path.realpath(path)), True
            continue
        yield path, path, False
        if levels > 1:
            yield from _folders_in(path, levels - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _check_inside(run: PastRun) -> None:
    """Raises:
    JobError: a file of the run is a link that leads out of the folder of runs.
    """
    for path in (run.path / name for name in READ):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(run.root):
            raise JobError(
                f"{run.name} is not read: its {path.name} is a link that leads out of {run.root}; put the file itself"
                " there"
            )


def _state(run: PastRun) -> _State:
    """Fingerprint of the log and the snapshot beside it: changes whenever one of them does."""
    return tuple(map(_state_of, (run.path / EVENTS, run.path / SNAPSHOT)))


def _state_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _understood(run: PastRun, read: Callable[[], T]) -> T:
    """Result of `read`, which reads the run's log.

    Raises:
        JobError: it cannot be read. Whatever a damaged log leads to must not hide other runs.
    """
    try:
        return read()
    except JobError:
        raise
    except Exception as error:
        log.warning("the event log in %s leads to an error", run.path, exc_info=True)
        raise JobError(
            f"the event log of {run.name} cannot be understood: {type(error).__name__}: {error}"
        ) from error


def _keep(kept: OrderedDict[Path, T], path: Path, value: T, most: int) -> None:
    """Keep `value` as the newest of at most `most`."""
    kept[path] = value
    kept.move_to_end(path)
    if len(kept) > most:
        kept.popitem(last=False)


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
    return os.path.lexists(path / EVENTS) or (path / MARKER).is_file()
