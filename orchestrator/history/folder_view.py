"""The view of a job from its folder alone: the newest snapshot, and the log after it."""

from __future__ import annotations

from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import JobView
from orchestrator.history.snapshot import LoadedLog, LogPosition, load
from orchestrator.history.unreported import unreported
from workers.protocol.errors import JobError


def load_folder(folder: JobFolder) -> LoadedLog:
    """Load the view of the log in `folder`.

    Raises:
        OSError: it cannot be read.
    """
    return load(folder.log_files(), folder.fetch_snapshot())


def view_in(folder: JobFolder) -> JobView:
    """The folder's job, as it ended or was lost.

    Raises:
        JobError: there is no log, or it cannot be read.
    """
    view = placed_view_in(folder)[0]
    try:
        left = unreported(folder.location, folder.records())
    except OSError as error:
        raise JobError(
            f"cannot read what ranks left in {folder.location}: {error.strerror or error}"
        ) from error
    for record in left:
        view.fold(record)
    return view


def placed_view_in(
    folder: JobFolder, known: tuple[JobView, LogPosition | None] | None = None
) -> tuple[JobView, LogPosition | None]:
    """The folder's job, and up to where its log was read.

    Args:
        known: what this returned earlier, with a view that may be folded further: only what was written since is read.

    Raises:
        JobError: there is no log, or it cannot be read.
    """
    view, at = known if known is not None else (None, None)
    try:
        loaded = load(
            folder.log_files(),
            folder.fetch_snapshot(),
            known=(view, at) if view is not None and at is not None else None,
            recent=False,
        )
    except OSError as error:
        raise JobError(
            f"cannot read the event log in {folder.location}: {error.strerror or error}"
        ) from error
    if loaded.damage is not None:
        raise JobError(str(loaded.damage)) from loaded.damage
    if not loaded.view.runs:
        raise JobError(f"{folder.location} holds no event log: name a job's output folder")
    return loaded.view, loaded.position


def view_without_controller(folder: JobFolder) -> JobView:
    """The job of the folder, which has no controller: as it ended, or with the trouble that it was lost.

    Raises:
        JobError: there is no log, or it cannot be read.
    """
    view = view_in(folder)
    if view.outcome is None:
        lost = (
            f"it was lost with the cluster's head after step {view.rescued}"
            if view.rescued
            else "it was lost"
        )
        view.trouble = (
            f"it has no controller: {lost}, and --resume goes on from its newest checkpoint, if any"
        )
    return view
