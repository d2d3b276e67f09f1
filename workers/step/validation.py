"""Validation: the mean loss over held-out samples, the same ones whatever the partition. Changes nothing."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from workers.data.dataset import Batch
from workers.data.sampling import validation_indices, validation_windows
from workers.reproducibility import rng
from workers.step.engine import Engine
from workers.step.generation import GenerationSetup
from workers.transport.channel import Channel

VALIDATION, SAMPLING = 1, 2
"""Purposes of forward passes outside training; see `Engine.evaluate`."""


def validate(setup: GenerationSetup, engine: Engine, channel: Channel) -> float | None:
    """The mean loss, the same on every rank; None without held-out samples. All ranks call it together."""
    config, dataset, plan = setup.config, setup.data.dataset, setup.plan
    samples, total = dataset.validation_samples, plan.replicas * plan.microbatches
    windows = validation_windows(samples, total * config.microbatch_size, config.data.validation_batches)
    if not windows:
        return None
    setup.reading.wait()
    losses = array("d")
    for numbers, window in itertools.product(setup.windows, range(windows)):

        def batch(microbatch: int, numbers: Sequence[int] = numbers, window: int = window) -> Batch:
            number = numbers[microbatch]
            indices = validation_indices(window, number, total, config.microbatch_size, samples)
            with rng.keyed(rng.key(config.seed, "validation data", window, number)):
                return dataset.validation(indices)

        results = engine.evaluate(batch, len(numbers), purpose=VALIDATION)
        for microbatch, (loss,) in results.items():
            replica, number = divmod(numbers[microbatch], plan.microbatches)
            losses.extend(((replica * windows + window) * plan.microbatches + number, float(loss)))
    # One order for the sum, whichever pipeline a microbatch is on.
    numbered: dict[float, float] = {}
    for record in channel.all_gather(losses.tobytes()):
        values = memoryview(record).cast("d")
        numbered.update(zip(values[::2], values[1::2], strict=True))
    return sum(loss for _, loss in sorted(numbered.items())) / len(numbered)
