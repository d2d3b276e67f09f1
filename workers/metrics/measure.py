"""Interface of a kind of metrics: what the rank with the last stage tells of each sample, and what all ranks make of
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor


class Measure(Protocol):
    """A kind of metrics, for models of one kind."""

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, all of `METRICS`."""
        ...

    @property
    def width(self) -> int:
        """Numbers per sample, K."""
        ...

    def of_samples(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Statistics of each sample of a microbatch: float64[B, K].

        Args:
            outputs: of the last layer.
            targets: of the batch.
        """
        ...

    def values(self, samples: NDArray[Any], loss: float) -> Mapping[str, float]:
        """Metric -> value. One that is not defined for these samples is left out.

        Args:
            samples: float64[N, K], in the order of the held-out samples.
            loss: the mean over all their targets.
        """
        ...
