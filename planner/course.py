"""The course of a job's batch: how many samples each step takes, and which of the data's order. Pure.

A leg is a run of steps with one batch. Most jobs have one leg from their first step to their last; with
`freeze.batch = "scale"` another one begins as layers freeze. Sampling, epochs, the learning rate, the end of the job
and the audit of its log all read this one course.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

LearningRate = Literal["constant", "linear", "sqrt"]
"""Growth of the learning rate with the batch."""

_FACTORS: Mapping[LearningRate, Callable[[float], float]] = {
    "constant": lambda times: 1.0,
    "linear": lambda times: times,
    "sqrt": math.sqrt,
}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Steps with one batch."""

    step: int
    """The first of them; 1 is the job's first."""
    sample: int
    """Samples that all steps before it take: the position in the data's order at which it begins."""
    replicas: int
    microbatches: int
    """Microbatches of each replica."""
    microbatch_size: int
    """Samples of each microbatch."""
    lr_factor: float = 1.0
    """Factor on the learning rate."""

    @property
    def batch(self) -> int:
        """Samples of each step."""
        return self.replicas * self.of_replica

    @property
    def of_replica(self) -> int:
        """Samples of each replica in a step."""
        return self.microbatches * self.microbatch_size


class Turn(NamedTuple):
    """When a sample is taken, and by whom."""

    begun: int
    """Samples that all earlier steps take."""
    replica: int
    offset: int
    """Samples that the replica takes before it in the same step."""
    of_replica: int
    """Samples that a replica takes in that step."""


@dataclass(frozen=True)
class Course:
    """A job's legs, in order."""

    legs: tuple[Leg, ...]

    def __post_init__(self) -> None:
        first = self.legs[0]
        if (first.step, first.sample) != (1, 0):
            raise ValueError(
                f"the first leg begins with step {first.step} at sample {first.sample}: it is to begin with step 1 at"
                " sample 0"
            )
        for before, leg in pairwise(self.legs):
            due = before.sample + (leg.step - before.step) * before.batch
            if leg.step <= before.step or leg.sample != due:
                raise ValueError(
                    f"the leg of step {leg.step} begins at sample {leg.sample}, after the one of step {before.step}"
                    f" that takes {before.batch} samples a step from {before.sample} on: steps must rise, and no sample"
                    " be left out or taken twice"
                )

    @staticmethod
    def of(replicas: int, microbatches: int, microbatch_size: int, further: Sequence[Leg] = ()) -> Course:
        """The course that begins with this batch.

        Args:
            further: legs after the first one.
        """
        first = Leg(
            step=1,
            sample=0,
            replicas=replicas,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
        )
        return Course((first, *further))

    @property
    def further(self) -> tuple[Leg, ...]:
        """The legs after the first one, which the job's spec does not know."""
        return self.legs[1:]

    def at(self, step: int) -> Leg:
        """The leg that `step` (1 is the job's first) belongs to."""
        return next(leg for leg in reversed(self.legs) if leg.step <= max(1, step))

    def taken(self, steps: int) -> int:
        """Samples that the first `steps` steps take."""
        leg = self.at(steps + 1)
        return leg.sample + (steps + 1 - leg.step) * leg.batch

    def positions(self, step: int, microbatch: int) -> range:
        """Positions in the data's order that a step's global microbatch takes; those of one replica after the other's.

        Args:
            step: from 1.
            microbatch: in [0, replicas x microbatches).
        """
        size = self.at(step).microbatch_size
        first = self.taken(step - 1) + microbatch * size
        return range(first, first + size)

    def turn(self, position: int) -> Turn:
        """When the sample at `position` of the data's order is taken, and by whom."""
        leg = next(leg for leg in reversed(self.legs) if leg.sample <= position)
        within = (position - leg.sample) % leg.batch
        replica, offset = divmod(within, leg.of_replica)
        return Turn(position - within, replica, offset, leg.of_replica)

    def steps(self, samples: int) -> int:
        """Steps that it takes to take `samples`; the last one may take more."""
        leg = next(leg for leg in reversed(self.legs) if leg.sample < max(1, samples))
        return leg.step - 1 + -(-(samples - leg.sample) // leg.batch)

    def last_step(self, steps: int) -> int:
        """The last step of a job that was to have `steps` steps with the batch that it begins with."""
        return self.steps(steps * self.legs[0].batch)

    def along(self, steps: int) -> float:
        """The first `steps` steps in steps of the batch that the job begins with, which rules over samples count in."""
        whole, rest = divmod(self.taken(steps), self.legs[0].batch)
        return whole if not rest else whole + rest / self.legs[0].batch

    def epoch(self, step: int, samples: int) -> int:
        """The epoch, of `samples` samples each, that the last sample of `step` belongs to; 0 is the first."""
        return (self.taken(step) - 1) // samples

    def grown(self, step: int, times: int, lr: LearningRate) -> Course:
        """The course with `times` the replicas that the job begins with from `step` on."""
        first, now = self.legs[0], self.at(step)
        leg = Leg(
            step=step,
            sample=self.taken(step - 1),
            replicas=first.replicas * times,
            microbatches=now.microbatches,
            microbatch_size=now.microbatch_size,
            lr_factor=_FACTORS[lr](times),
        )
        return Course((*self.legs, leg))


def times_as_many(layers: int, frozen: int, frozen_cost: float) -> int:
    """Number of pipelines for the ranks of one, once `frozen` of its `layers` go forward only: a power of two, as
    PipeTransformer halves the ranks of a pipeline (section 3.2, eq. 2), and doubles the pipelines (section 3.3).

    Args:
        frozen_cost: of a frozen layer over that of a trained one, the paper's lambda.
    """
    left = layers - frozen + frozen_cost * frozen
    times = 1
    while 2 * times * left <= layers:
        times *= 2
    return times
