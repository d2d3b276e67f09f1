"""Rank that keeps a cluster from measuring a job, among those that failed because of it. Asks no actor."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.exceptions import GetTimeoutError, RayActorError

from workers.control.rank_error import RankError
from workers.launch.waiting import waits_for_a_rank

_THREAD = re.compile(r"^thread .*:\n", re.MULTILINE)
_STARTED_BY_PYTHON = re.compile(r'  File ".*/threading\.py", line \d+, in _bootstrap\n')


def first_cause(failures: Mapping[int, BaseException]) -> int:
    """The rank whose failure explains the others, of `failures` by rank.

    A rank's own error explains the most, then a death, then a call without an answer. A rank that lost another one
    explains nothing.
    """
    return min(failures, key=lambda rank: (_distance(failures[rank]), rank))


def _distance(error: BaseException) -> int:
    match error:
        case RankError(cut_off=True):
            return 3
        case GetTimeoutError():
            return 2
        case RayActorError():
            return 1
        case _:
            return 0


def hanging(stacks: Mapping[int, str]) -> list[int]:
    """The late ranks that hang: all of them, less those that wait for other ranks, unless all do.

    Args:
        stacks: by late rank, what `workers.process.stacks` returned there; empty if the rank did not answer.
    """
    return sorted(rank for rank, text in stacks.items() if not _waits(text)) or sorted(stacks)


def _waits(stacks: str) -> bool:
    # Ray runs an actor's calls on threads of its own. Those that Python started belong to the transport,
    # and wait for messages in any case.
    threads = _THREAD.split(stacks)[1:]
    return any(waits_for_a_rank(calls) for calls in threads if not _STARTED_BY_PYTHON.match(calls))
