"""Errors that processes tell each other of, in words for the user or in numbers, and those of their links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryShortage:
    """An allocation of a rank failed for want of memory. In bytes; None: unknown."""

    needed_bytes: int | None = None
    """The size of the allocation."""
    free_bytes: int | None = None
    """Free memory of the rank's device."""
    held_bytes: int | None = None
    """Memory that the rank's tensors took at that moment."""
    peak_bytes: int | None = None
    """The most that the rank has taken of its device's memory so far."""


class JobError(Exception):
    """An error that a user can fix: what is wrong, the number, what to do."""


class ChannelError(RuntimeError):
    """A message that does not fit its stream, or a peer that is gone."""


class StateStreamError(ChannelError):
    """A layer's state did not arrive: its source is gone, refuses, lacks it, or sent something else."""


@dataclass(frozen=True, kw_only=True)
class DamagedCheckpoint:
    """The damage that a rank found in a checkpoint."""

    path: str
    file: str
    problem: str
