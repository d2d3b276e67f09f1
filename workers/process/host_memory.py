"""Memory of a process that does nothing but train: pages it frees stay, and what is built is not searched for garbage.

A step frees and allocates the same tensors as the step before. glibc's defaults give large ones back at every free,
and the next step faults every page in again.
"""

from __future__ import annotations

import ctypes
import gc

# mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


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


def settle_objects() -> None:
    """Exclude all Python objects that exist now from garbage collection.

    Torch alone creates hundreds of thousands; a full collection over them takes tens of milliseconds, in the middle of
    a step. Call it once, before building layers that may be given away: objects frozen here are never collected.
    """
    gc.collect()
    gc.freeze()


def collect_objects() -> None:
    """Free reference cycles, such as layers given away. Call it where nobody waits for this rank."""
    gc.collect()
