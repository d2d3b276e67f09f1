"""Memory of a process that does nothing but train: pages it frees stay, and what is built is not searched for garbage.

A step frees and allocates the same tensors as the step before. glibc's defaults give large ones back at every free,
and the next step faults every page in again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20

LEAST_FREE_BYTES = 2**28
"""Host memory that copies of layers leave to others."""


def keep_freed_pages() -> bool:
    """Have the C library's allocator keep freed pages, for the rest of the process.

    Returns:
        Whether it could be set: False where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    # 32 MiB is the largest threshold that glibc takes; larger tensors are still mapped one by one. One arena: the
    # training thread is not the main thread, and other arenas' heaps end at 64 MiB.
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in (
            (_MMAP_THRESHOLD, 32 * _MIB),
            (_TRIM_THRESHOLD, 1024 * _MIB),
            (_TOP_PAD, 64 * _MIB),
            (_ARENA_MAX, 1),
        )
    )


def give_freed_pages_back() -> None:
    """Have the C library's allocator give the pages that it keeps back to the host; nothing where it is not glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def free_host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of the host that processes can still take, or what this process's control group leaves of it.

    Args:
        group: the folder of the control group.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # there is no group, or it has no limit
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        # The kernel takes cached files back before it refuses memory.
        files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + (int(files[1]) if files else 0))
    return max(0, free)


def lies_in_memory(path: str, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether the file system that has `path` keeps its files in this host's memory.

    Args:
        mounts: the table of mounted file systems; where there is none, the answer is no.
    """
    try:
        table = [line.split(" ") for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    whole, kind, length = os.path.realpath(path), "", -1
    for _, there, its_kind, *_ in table:
        folder = there.replace("\\040", " ")
        if os.path.commonpath([folder, whole]) == folder and len(folder) >= length:
            kind, length = its_kind, len(folder)
    return kind in ("tmpfs", "ramfs")


def check_room(
    needed_bytes: int, free_bytes: int, sharing: int = 1, what: str = "the next layer takes"
) -> None:
    """Check that the host has memory for one more layer.

    Args:
        needed_bytes: the layer's size.
        free_bytes: what is left.
        sharing: ranks on this host, each of which needs as much.
        what: subject and verb of what is said if it has not.

    Raises:
        MemoryError: so much more would leave others too little.
    """
    if free_bytes - sharing * needed_bytes < LEAST_FREE_BYTES:
        others = "" if sharing == 1 else f" on each of {sharing} ranks"
        raise MemoryError(
            f"{what} {needed_bytes:,} bytes{others}, and the host has {free_bytes:,} left, of which"
            f" {LEAST_FREE_BYTES:,} are for others"
        )


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile. An import of torch makes hundreds of thousands of objects, all of which stay: to
    search them again and again takes a sixth of the processor time of a rank's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def exclude_from_collections() -> None:
    """Exclude all Python objects that exist now from garbage collection.

    Torch alone creates hundreds of thousands; a full collection over them takes tens of milliseconds, in the middle of
    a step. Call it once, before building layers that may be given away: objects frozen here are never collected.
    """
    gc.collect()
    gc.freeze()


def collect_objects() -> None:
    """Free reference cycles, such as layers given away. Call it where nobody waits for this rank."""
    gc.collect()
