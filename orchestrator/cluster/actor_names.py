"""The names of Freshet's actors and placement groups: `JOB` for a controller, `JOB/rank-N` for a rank.

No other module makes or parses such names. Ray is imported at the first query of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NAMESPACE = "freshet"
"""The namespace of all of Freshet's actors in a Ray cluster."""
_RANK = "/rank-"


@dataclass(frozen=True)
class JobActors:
    """The living actors of one job."""

    controller: bool
    ranks: frozenset[int]


def rank_name(job: str, rank: int) -> str:
    """Return the name of a rank's actor and of its placement group."""
    return f"{job}{_RANK}{rank}"


def split_name(name: str) -> tuple[str, int | None]:
    """Return (job, number of the rank; None: the name is a controller's)."""
    job, separator, number = name.rpartition(_RANK)
    return (job, int(number)) if separator and number.isdecimal() else (name, None)


def jobs_among(names: Iterable[str]) -> dict[str, JobActors]:
    """Return job -> those of its actors that are among `names`."""
    controllers: set[str] = set()
    ranks: dict[str, set[int]] = {}
    for job, rank in map(split_name, names):
        if rank is None:
            controllers.add(job)
        else:
            ranks.setdefault(job, set()).add(rank)
    return {
        job: JobActors(job in controllers, frozenset(ranks.get(job, ())))
        for job in sorted({*controllers, *ranks})
    }


def ranks_among(job: str, names: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the ranks of `job` among `names`."""
    found = jobs_among(names).get(job)
    return found.ranks if found is not None else frozenset()


def living_names() -> tuple[str, ...]:
    """Return the names of all of Freshet's actors that live or are starting in the connected cluster."""
    import ray.util

    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    return tuple(entry["name"] for entry in actors if entry["namespace"] == NAMESPACE)


def living_jobs() -> dict[str, JobActors]:
    """Return job -> its living actors."""
    return jobs_among(living_names())


def living_ranks(job: str) -> frozenset[int]:
    """Return the numbers of the ranks of `job` that live or are starting."""
    return ranks_among(job, living_names())
