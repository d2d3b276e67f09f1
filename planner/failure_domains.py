"""Failure domains by name: the node that a rank is on, and the zone of that node where it is known. Pure.

A name is `NODE` or `ZONE/NODE`, so that a list of names says all that a choice of places needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.wording import counted


def domain_name(node: str, zone: str = "") -> str:
    """The failure domain of a rank on `node`; an empty `zone` is an unknown one."""
    return f"{zone}/{node}" if zone else node


def zone_of(domain: str) -> str:
    """The zone of a failure domain; empty if it is unknown."""
    return domain.rpartition("/")[0]


def lacking(domains: Sequence[str], copies: int) -> str | None:
    """Why `copies` copies of a layer cannot all survive the loss of their layer's node, as text for people; None if
    they can.

    One copy is never refused: without another node it is on another rank of the same one, which helps if a process
    dies.

    Args:
        domains: per place, its failure domain.
        copies: beside the owner.
    """
    nodes = len({*domains})
    if copies <= 1 or nodes > copies:
        return None
    return (
        f"elastic.copies = {copies} needs {copies + 1} failure domains, and the job has {counted(nodes, 'node')}: a"
        " layer and its copies are each on another node"
    )
