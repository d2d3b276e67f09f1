"""The few file operations that a checkpoint needs, on a local folder or a URI that pyarrow supports.

Knows nothing of checkpoints. A file is complete or absent; operations raise the file system's OSError.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_OBJECT_STORES = ("s3", "gcs", "abfs")
PARTIAL = ".partial"
"""Suffix of a file that is being written, or whose writer was killed."""


def open_folder(location: str) -> Folder:
    """The folder at `location`, a local path or a URI with a scheme. The first write creates it if needed.

    Raises:
        JobError: no filesystem supports the URI, or it does not name a folder.
    """
    if "://" not in location:
        return LocalFolder(Path(location))
    # Imported here: a local job never needs it, and it is slow to load.
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    remedy = "use a local path or a URI such as s3://bucket/folder"
    try:
        filesystem, path = FileSystem.from_uri(location)
    except (ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise JobError(f"cannot open {location}: {reason}; {remedy}") from error
    if not path.strip("/"):
        raise JobError(f"cannot open {location}: it names no folder; {remedy}")
    return UriFolder(filesystem, path.rstrip("/"))


def join(location: str, name: str) -> str:
    """The location of `name` in the folder at `location`; a URI keeps its options,
    `s3://bucket?region=eu`."""
    if "://" not in location:
        return os.path.join(location, name)
    path, mark, options = location.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def split(location: str) -> tuple[str, str]:
    """The folder that holds the file at `location`, and the file's name; `join` reverses it."""
    if "://" not in location:
        folder, name = os.path.split(location)
        return folder or ".", name
    path, mark, options = location.partition("?")
    folder, _, name = path.rpartition("/")
    return f"{folder}{mark}{options}", name


class Folder(ABC):
    """A folder. Names are those of its direct entries."""

    @abstractmethod
    def child(self, name: str) -> Folder:
        """The folder `name` in this one."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace the file `name`. A crash leaves the new file, the old one or none."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The file's bytes. Raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Its files and folders, sorted; none when it does not exist."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file or folder `name`."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of the file `name`; -1 if it does not exist."""

    @abstractmethod
    def age_s(self, name: str) -> float:
        """Seconds since the file `name` was last written; 0 if it does not exist or nobody tells."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete the file `name` if it exists."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the folder and everything in it, if it exists."""


class LocalFolder(Folder):
    """A folder of a mounted file system. Files are renamed into place once they are on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def write(self, name: str, data: bytes) -> None:
        if not self._path.is_dir():
            self._path.mkdir(parents=True, exist_ok=True)
            _sync_folder(self._path.parent)
        partial = self._path / _partial(name)
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path / name)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(self._path)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def names(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self._path)))
        except FileNotFoundError:
            return ()

    def exists(self, name: str) -> bool:
        return (self._path / name).exists()

    def size(self, name: str) -> int:
        try:
            return (self._path / name).stat().st_size
        except FileNotFoundError:
            return -1

    def age_s(self, name: str) -> float:
        try:
            return time.time() - (self._path / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def delete(self) -> None:
        if self._path.exists():
            shutil.rmtree(self._path)


class UriFolder(Folder):
    """A folder of a pyarrow filesystem: it writes with one PUT where that is atomic (object stores), else
    with a move."""

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path

    def child(self, name: str) -> UriFolder:
        return UriFolder(self._filesystem, f"{self._path}/{name}")

    def write(self, name: str, data: bytes) -> None:
        if self._filesystem.type_name in _OBJECT_STORES:
            self._put(name, data)
            return
        self._filesystem.create_dir(self._path, recursive=True)
        partial = _partial(name)
        try:
            self._put(partial, data)
            self._filesystem.move(f"{self._path}/{partial}", f"{self._path}/{name}")
        except BaseException:
            self.remove(partial)
            raise

    def _put(self, name: str, data: bytes) -> None:
        with self._filesystem.open_output_stream(f"{self._path}/{name}") as stream:
            stream.write(data)

    def read(self, name: str) -> bytes:
        with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
            return stream.read()

    def names(self) -> tuple[str, ...]:
        from pyarrow.fs import FileSelector

        entries = self._filesystem.get_file_info(FileSelector(self._path, allow_not_found=True))
        return tuple(sorted(entry.base_name for entry in entries))

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return self._filesystem.get_file_info(f"{self._path}/{name}").type != FileType.NotFound

    def size(self, name: str) -> int:
        size: int | None = self._filesystem.get_file_info(f"{self._path}/{name}").size
        return -1 if size is None else size

    def age_s(self, name: str) -> float:
        written_s = self._filesystem.get_file_info(f"{self._path}/{name}").mtime_ns
        return 0.0 if written_s is None else time.time() - written_s / 1e9

    def remove(self, name: str) -> None:
        if self.exists(name):
            self._filesystem.delete_file(f"{self._path}/{name}")

    def delete(self) -> None:
        from pyarrow.fs import FileType

        if self._filesystem.get_file_info(self._path).type != FileType.NotFound:
            self._filesystem.delete_dir(self._path)


def _partial(name: str) -> str:
    """A name that no other writer uses and that no reader looks for."""
    return f".{name}.{secrets.token_hex(4)}{PARTIAL}"


def _sync_folder(path: Path) -> None:
    """Flush the folder's entries to disk: a power failure may lose a rename alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
