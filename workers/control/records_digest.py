"""The digest of a commit's records, by which ranks and controller compare them without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def vector_sha256(vector: Iterable[bytes]) -> str:
    """The digest of encoded records, by which ranks that hold the same ones know it."""
    digest = hashlib.sha256()
    for record in vector:
        digest.update(len(record).to_bytes(8, "big"))
        digest.update(record)
    return digest.hexdigest()
