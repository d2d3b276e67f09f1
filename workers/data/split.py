"""Number of samples held out for validation: the last ones, so that they follow the text trained on."""

from __future__ import annotations

import math

from workers.protocol.errors import JobError


def held_out(samples: int, fraction: float) -> int:
    """`fraction` of `samples`, rounded down.

    Raises:
        JobError: `fraction` is above 0 and gives no whole sample.
    """
    count = int(samples * fraction)
    if fraction > 0 and count == 0:
        enough = f"raise it to {math.ceil(1000 / samples) / 1000:g}, " if samples > 1 else ""
        raise JobError(
            f"data.validation_fraction = {fraction:g} holds out none of {samples} samples:"
            f" {enough}add data, or set it to 0 to go without validation"
        )
    return count
