"""Records by number in files that the processes of a node share, in memory first and then on disk.

A slot holds data, then a checksum, then a mark that says whose data it is: a kill leaves no half a record that counts,
a flipped bit or another mark is a miss, and nobody has to be told of anything: no daemon, no queue, no locks. Slots are
read and written by position rather than through a memory map: where a file system is full, a write fails and says so,
and a map would end the process.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK_BYTES = 16
_END = struct.Struct(f"<I{MARK_BYTES}s")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True)
class Tier:
    """A folder for slots."""

    folder: Path
    bound_bytes: int
    """The most that files there may take."""


class SlotFiles:
    """The slots of one process, in the folders of `tiers`; a number has its slot in the first that has room for it.

    Data of each length have files of their own. Threads may read while another one writes.

    Args:
        warn: is told once of each folder that cannot be written to.
    """

    def __init__(self, tiers: Sequence[Tier], warn: Callable[[str], None]) -> None:
        self._tiers = [*tiers]
        self._warn = warn
        self._files: dict[tuple[int, int], int] = {}
        """(number of the tier, bytes of data) -> descriptor."""
        self._unusable: set[int] = set()
        """Tiers that failed."""
        self._opening = threading.Lock()
        """Held as files are opened and closed."""
        self._closed = False

    def read(self, number: int, into: Sequence[memoryview], mark: bytes) -> bool:
        """Read the data of `number` into the buffers `into`, in order; whether it was there, whole and with `mark`. If
        not, the buffers have undefined content."""
        data_bytes = sum(part.nbytes for part in into)
        end = bytearray(_END.size)
        at = number * (data_bytes + _END.size)
        for tier in range(len(self._tiers)):
            descriptor = self._file(tier, data_bytes, create=False)
            if descriptor is None:
                continue
            try:
                # The mark alone first: most of what is not there has none.
                if os.pread(descriptor, _END.size, at + data_bytes)[-MARK_BYTES:] != mark:
                    continue
                if os.preadv(descriptor, [*into, end], at) != data_bytes + len(end):
                    continue
            except OSError:  # a disk that fails, or the files have been closed meanwhile
                continue
            checksum, found = _END.unpack(end)
            if found == mark and checksum == _checksum(into, mark):
                return True
        return False

    def raw(self, number: int, data_bytes: int, mark: bytes) -> bytes | None:
        """The slot of `number` as it lies there, if it has `mark`; `take` says whether it is whole."""
        slot_bytes = data_bytes + _END.size
        for tier in range(len(self._tiers)):
            descriptor = self._file(tier, data_bytes, create=False)
            if descriptor is None:
                continue
            with suppress(OSError):
                end = os.pread(descriptor, _END.size, number * slot_bytes + data_bytes)
                if end[-MARK_BYTES:] == mark:
                    slot = os.pread(descriptor, slot_bytes, number * slot_bytes)
                    if len(slot) == slot_bytes:
                        return slot
        return None

    def write(
        self, number: int, data: Sequence[memoryview], mark: bytes, beside: Collection[int] = ()
    ) -> bool:
        """Write the data of `number`; whether there was room.

        Args:
            beside: lengths of other data, in bytes, that make no room for these.
        """
        data_bytes = sum(part.nbytes for part in data)
        slot_bytes = data_bytes + _END.size
        at, end = number * slot_bytes, _END.pack(_checksum(data, mark), mark)
        for tier in self._in_turn(data_bytes, at, {data_bytes, *beside}):
            descriptor = self._file(tier, data_bytes, create=True)
            if descriptor is None:
                continue
            try:
                if os.pwritev(descriptor, [*data, end], at) == slot_bytes:
                    return True
                self._give_up(tier, "it is full")
            except OSError as error:
                self._give_up(tier, "it is full" if error.errno in _FULL else str(error))
        return False

    def _in_turn(self, data_bytes: int, at: int, lengths: Collection[int]) -> list[int]:
        """The tiers to write to: that which has the slot's blocks already, else those with room for it."""
        free: list[int] = []
        for tier, place in enumerate(self._tiers):
            self._leave_removed(tier)
            descriptor, slot_bytes = self._file(tier, data_bytes, create=False), data_bytes + _END.size
            if descriptor is not None and _has_blocks(descriptor, at, slot_bytes):
                return [tier]
            if tier in self._unusable:
                continue
            if taken_bytes(place.folder) + slot_bytes > place.bound_bytes:
                self._remove_others(tier, lengths)
            if taken_bytes(place.folder) + slot_bytes <= place.bound_bytes:
                free.append(tier)
        return free

    def note(self, name: str, text: str) -> None:
        """Leave a short text beside the slots, under the hexadecimal `name`, for others."""
        for tier, place in enumerate(self._tiers):
            if tier in self._unusable:
                continue
            path = place.folder / f"{name}.json"
            own = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            with suppress(OSError):
                own.write_text(text)
                own.replace(path)
                return
            with suppress(OSError):
                own.unlink(missing_ok=True)

    def noted(self, name: str) -> str | None:
        """The text that was left under `name`."""
        for place in self._tiers:
            with suppress(OSError, ValueError):  # it is not there, or no text
                return (place.folder / f"{name}.json").read_text()
        return None

    def taken_bytes(self) -> int:
        """Bytes that all slots take, by whichever process they were written."""
        return sum(taken_bytes(tier.folder) for tier in self._tiers)

    def _remove_others(self, tier: int, lengths: Collection[int]) -> None:
        """Give up the data of other lengths: those of fewer frozen layers than now."""
        for path in _slots_in(self._tiers[tier].folder):
            if path.stem not in map(str, lengths):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        with self._opening:
            for place, length in [*self._files]:
                if place == tier and length not in lengths:
                    _close(self._files.pop((place, length)))

    def _leave_removed(self, tier: int) -> None:
        """Close files that another process has removed: nobody counts what they take."""
        for key, descriptor in [*self._files.items()]:
            with suppress(OSError):
                if key[0] == tier and not os.fstat(descriptor).st_nlink:
                    with self._opening:
                        _close(self._files.pop(key))

    def _file(self, tier: int, data_bytes: int, *, create: bool) -> int | None:
        """Descriptor of a file. None: there is none, or it cannot be opened."""
        known = self._files.get((tier, data_bytes))
        if known is not None or tier in self._unusable:
            return known
        how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with self._opening:
            if self._closed or (tier, data_bytes) in self._files:
                return self._files.get((tier, data_bytes))
            try:
                descriptor = os.open(self._tiers[tier].folder / f"{data_bytes}.slots", how, 0o600)
            except OSError as error:
                if create or not isinstance(error, FileNotFoundError):
                    self._give_up(tier, error.strerror or str(error))
                return None
            self._files[tier, data_bytes] = descriptor
        return descriptor

    def _give_up(self, tier: int, why: str) -> None:
        """Write nothing more to a tier."""
        if tier not in self._unusable:
            self._unusable.add(tier)
            self._warn(
                f"no more activations of frozen layers are kept in {self._tiers[tier].folder}: {why}. Those that are"
                " missing are computed"
            )

    def close(self) -> None:
        """Close the files; nothing is found or written any more."""
        with self._opening:
            self._closed = True
            files, self._files = self._files, {}
            for descriptor in files.values():
                _close(descriptor)


def take(slot: bytes | bytearray, into: Sequence[memoryview], mark: bytes) -> bool:
    """Read a slot, as `SlotFiles.raw` has it, into the buffers `into`, in order; whether it is whole and has `mark`. If
    not, the buffers have undefined content."""
    data_bytes = sum(part.nbytes for part in into)
    if len(slot) != data_bytes + _END.size:
        return False
    at, view = 0, memoryview(slot)
    for part in into:
        part[:] = view[at : at + part.nbytes]
        at += part.nbytes
    checksum, found = _END.unpack(view[data_bytes:])
    return found == mark and checksum == _checksum(into, mark)


def taken_bytes(folder: Path) -> int:
    """Bytes that the slots in `folder` take, whoever wrote them."""
    taken = 0
    for path in _slots_in(folder):
        with suppress(OSError):
            taken += path.stat().st_blocks * _BLOCK_BYTES
    return taken


def _close(descriptor: int) -> None:
    with suppress(OSError):  # some file systems tell only now that there was no room
        os.close(descriptor)


def _slots_in(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if name.endswith(".slots")]
    except OSError:
        return []


def _has_blocks(descriptor: int, at: int, length: int) -> bool:
    """Whether the file system has given the file blocks for these bytes."""
    try:
        return os.lseek(descriptor, at, os.SEEK_HOLE) >= at + length
    except OSError:  # beyond its end
        return False


def _checksum(parts: Sequence[memoryview], mark: bytes) -> int:
    checksum = zlib.crc32(mark)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
