"""state_sha256 of a model, from its layers' digests. No torch here: the controller computes it too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def state_digest(layer_digests: Sequence[str]) -> str:
    """sha256 (hex) over the layers' digests (hex), given in layer order."""
    return hashlib.sha256("".join(layer_digests).encode()).hexdigest()
