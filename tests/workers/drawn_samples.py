"""Samples that a microbatch of a job with one batch takes."""

from planner.course import Course
from workers.data.sampling import SampleStream, train_places
from workers.protocol.section import Shuffle


def drawn_places(
    seed: int,
    step: int,
    microbatch: int,
    microbatches: int,
    size: int,
    samples: SampleStream,
    shuffle: Shuffle | None = None,
) -> list[tuple[int, int]]:
    """(epoch, sample) of each place.

    Args:
        step: from 0.
        microbatches: of all replicas.
        size: samples of a microbatch.
    """
    positions = Course.of(1, microbatches, size).positions(step + 1, microbatch)
    return train_places(seed, positions, samples, shuffle)
