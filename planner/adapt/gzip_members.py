"""Reads a file of gzip members that follow each other, some of which were not written whole. Pure."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator

BEGIN = b"\x1f\x8b\x08"
"""The first bytes of a member (RFC 1952, section 2.3.1)."""
_PIECE_BYTES = 1 << 16


def members(file: bytes | mmap.mmap) -> Iterator[bytes | int]:
    """Yields the content of each whole member, and the number of bytes of each gap before, between or after them."""
    at = lost = 0
    while at < len(file):
        found = _member(file, at) if file[at : at + len(BEGIN)] == BEGIN else None
        if found is None:
            # A writer that was killed left part of a member, which the next one's follows.
            following = file.find(BEGIN, at + 1)
            following = len(file) if following < 0 else following
            at, lost = following, lost + following - at
            continue
        if lost:
            yield lost
            lost = 0
        content, at = found
        yield content
    if lost:
        yield lost


def _member(file: bytes | mmap.mmap, begin: int) -> tuple[bytes, int] | None:
    """(content, end) of the member that begins at `begin`; None if it is not whole."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    pieces: list[bytes] = []
    at = begin
    try:
        while not reader.eof and at < len(file):
            pieces.append(reader.decompress(file[at : at + _PIECE_BYTES]))
            at = min(len(file), at + _PIECE_BYTES)
    except zlib.error:
        return None
    return (b"".join(pieces), at - len(reader.unused_data)) if reader.eof else None
