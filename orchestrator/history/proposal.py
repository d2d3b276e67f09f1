"""A job's answer to a request for another partition: a value, with JSON both ways. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from planner.search.alternatives import Alternative
from workers.protocol.errors import JobError


class PlanChanged(JobError):
    """A plan was to be replaced that is no longer the job's newest.

    Args:
        text: for people.
        epoch: of the newest plan.
        version: of the newest plan.
    """

    def __init__(self, text: str, epoch: int, version: int) -> None:
        super().__init__(text, epoch, version)
        self.epoch = epoch
        self.version = version

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A partition that the ranks could have, validated and simulated. Nothing has changed yet."""

    partition: tuple[int, ...]
    """Layers per stage."""
    current_partition: tuple[int, ...]
    """Layers per stage once the moves that were requested so far are over."""
    base: tuple[int, int]
    """(epoch, version) of the job's newest plan, for `apply`."""
    problem: str | None
    """Why it cannot be applied; None: it can."""
    moved_layers: tuple[int, ...] = ()
    """The layers that would change ranks."""
    predicted_step_s: float | None = None
    """With nothing frozen; None without a profile, or for no valid partition."""
    current_predicted_step_s: float | None = None
    """The same for the current partition."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Per place of the pipeline, as predicted; empty where nothing is predicted."""
    memory_limit_bytes: tuple[int, ...] = ()
    """Per place of the pipeline, what its device has."""
    candidates: tuple[Alternative, ...] = ()
    """The cuts that the planner compared for these ranks, with their predicted times; empty without a profile."""

    def to_json(self) -> bytes:
        """The proposal as JSON."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(text: bytes | str) -> Proposal:
        """The proposal that `to_json` wrote.

        Raises:
            ValueError: the text is no proposal.
        """
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Proposal)
