"""Validation: the loss over held-out samples, each of them once, and what a measure makes of the outputs.

Not here: when it is due (`between_steps.py`).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workers.data.dataset import Batch
from workers.data.sampling import validation_indices, validation_samples
from workers.metrics.measure import Measure
from workers.reproducibility import rng
from workers.step.engine import Engine
from workers.step.generation import GenerationSetup
from workers.transport.channel import Channel

WHOLE, LAST = 1, 3
"""Purposes of its forward passes: whole microbatches, and the last one, which may have fewer samples; see
`Engine.evaluate`."""


_Entry = tuple[int, float, float, tuple[float, ...]]
"""(position, loss, share, statistics of its samples) of a microbatch."""


@dataclass(frozen=True)
class Validated:
    """Result of a validation."""

    loss: float
    """Mean over all targets of the samples; where the loss tells no shares, over the samples."""
    metrics: Mapping[str, float]


def validate(setup: GenerationSetup, engine: Engine, channel: Channel) -> Validated | None:
    """Validate on the same held-out samples whatever the partition; None without any.

    All ranks call this together; the result is the same on every rank.
    """
    config, dataset, plan = setup.config, setup.data.dataset, setup.plan
    size, total = config.pipeline.microbatch_size, plan.replicas * plan.microbatches
    of_step = config.course().legs[0].batch
    samples = validation_samples(dataset.validation_samples, of_step, config.data.validation_batches)
    if not samples:
        return None
    setup.reading.wait()
    whole, rest = divmod(samples, size)
    told = array("d")

    def evaluate(positions: Sequence[int], purpose: int) -> None:
        """Evaluate microbatches of this pipeline, by their positions in the validation."""

        def batch(number: int) -> Batch:
            position = positions[number]
            indices = validation_indices(position, size, samples)
            with rng.keyed(rng.key(config.job.seed, "validation data", position)):
                read = dataset.validation(indices)
            if (found := setup.kept.find(indices, held_out=True)) is None:
                return replace(read, samples=tuple(indices))
            return replace(read, inputs=found[1], through=found[0], samples=tuple(indices))

        for number, (loss, share, of_samples) in engine.evaluate(
            batch, len(positions), purpose=purpose
        ).items():
            position = positions[number]
            count = rest if position == whole else size
            told.extend((position, float(loss), float(share) * count / size))
            told.extend(of_samples.flatten().tolist())

    for window in range(math.ceil(samples / (total * size))):
        for numbers in setup.windows:
            positions = [window * total + number for number in numbers]
            if complete := [position for position in positions if position < whole]:
                evaluate(complete, WHOLE)
            if rest and whole in positions:
                evaluate([whole], LAST)
    measure = setup.measure
    width = 0 if measure is None else measure.width
    # One order for the sums, whichever pipeline a microbatch is on.
    found = sorted(
        entry
        for record in channel.all_gather(told.tobytes())
        for entry in _entries(memoryview(record).cast("d"), lambda p: rest if p == whole else size, width)
    )
    shares = sum(share for _, _, share, _ in found)
    loss = sum(share * loss for _, loss, share, _ in found) / (shares or 1.0)
    if measure is None:
        return Validated(loss, {})
    # On one rank: where processors or libraries differ, so may last bits, and all decide by these numbers.
    values = _metrics(measure, found, samples, loss) if setup.place == 0 else {}
    (told_by_first, *_) = channel.all_gather(json.dumps(values).encode())
    return Validated(loss, json.loads(told_by_first))


def _metrics(measure: Measure, found: Sequence[_Entry], samples: int, loss: float) -> dict[str, float]:
    """Metric -> its value over all samples, from the entries of all microbatches."""
    numbers = [number for *_, values in found for number in values]
    of_samples = np.array(numbers).reshape(samples, measure.width)
    return {name: float(value) for name, value in measure.values(of_samples, loss).items()}


def _entries(told: memoryview[float], samples_of: Callable[[int], int], width: int) -> list[_Entry]:
    """The entry of each microbatch that a rank tells of."""
    entries = []
    start = 0
    while start < len(told):
        position = int(told[start])
        stop = start + 3 + samples_of(position) * width
        entries.append((position, told[start + 1], told[start + 2], tuple(told[start + 3 : stop])))
        start = stop
    return entries
