"""Files that several checkpoints of a job share, in a folder beside them: what training does not change. Each has the
sha256 of its bytes as its name, so a file is either whole or not there under that name. Knows no tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from workers.checkpoint.manifest import FileRecord, KeptFile, kept_folder
from workers.checkpoint.storage import PARTIAL, open_folder

_ABANDONED_S = 3600.0
"""Age at which a shared file that no checkpoint has named, or that is not whole, counts as left by a writer that was
killed."""


class KeptFiles:
    """The folder as one writer knows it: it reads a file that others have written once, before it relies on it."""

    def __init__(self) -> None:
        self._undamaged: set[str] = set()

    def keep(self, folder: str, data: bytes) -> tuple[KeptFile, bool]:
        """Have `data` in a file that the checkpoint at `folder` may name.

        Returns:
            The file, and whether it was written: not if it was there, whole and undamaged.

        Raises:
            OSError: the file system refused.
        """
        target = open_folder(kept_folder(folder))
        file = KeptFile(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        # One that is old may be on its way out, unless a checkpoint names it: written again, it stays.
        there = target.size(file.name) == file.bytes and target.age_s(file.name) < _ABANDONED_S / 2
        if there and file.name not in self._undamaged:
            try:
                there = target.read(file.name) == data
            except FileNotFoundError:  # deleted just now
                there = False
        if not there:
            target.write(file.name, data)
        self._undamaged.add(file.name)
        return file, not there


def check_kept(folder: str, records: Iterable[FileRecord]) -> None:
    """Check that all shared files that `records` name are there, before the checkpoint at `folder` is completed.

    Raises:
        OSError: some are gone.
    """
    if not (named := names_of(records)):
        return
    location = kept_folder(folder)
    if gone := sorted(named - {*open_folder(location).names()}):
        lost = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        raise OSError(f"{location} has lost {lost}, which this checkpoint shares with others")


def names_of(records: Iterable[FileRecord]) -> frozenset[str]:
    """Names of the shared files that `records` name."""
    return frozenset(file.name for record in records for file in record.kept_files)


def prune_kept(folder: str, named: Collection[str], dropped: Collection[str]) -> None:
    """Delete the files of a job that no checkpoint names any more, and what killed writers left.

    A file that nobody has named yet may be of a checkpoint that other ranks are still writing.

    Args:
        folder: location of any checkpoint of the job.
        named: names of the files that its checkpoints name.
        dropped: names of those that checkpoints named which have just been deleted.
    """
    target = open_folder(kept_folder(folder))
    for name in target.names():
        if name in named or not name.endswith((PARTIAL, KeptFile.SUFFIX)):
            continue
        if name in dropped or target.age_s(name) > _ABANDONED_S:
            target.remove(name)
