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
    """Set the C library's allocator so, for the rest of the process.

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
    """Take all Python objects that exist now out of the garbage collector's rounds.

    Torch alone brings hundreds of thousands; a full round over them takes tens of milliseconds, in the middle of some
    step. Call it once, before layers are built that may be given away: what is garbage by then is never found.
    """
    gc.collect()
    gc.freeze()


def collect_objects() -> None:
    """Free what was given away since and keeps itself alive. Call it where nobody waits for this rank."""
    gc.collect()
