"""The cluster: nodes, who uses them, which are leaving, devices and links, past preemptions."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from dashboard.api.cluster import MeasuredDevice, MeasuredLink, cluster, measured
from dashboard.pages.shown import page_router
from dashboard.pages.templating import page
from dashboard.service.access import Caller, Role
from dashboard.service.services import From, Parts, Services
from orchestrator.quantities import seconds, size
from orchestrator.report.parts import Column, Table
from planner.wording import counted

router = page_router()

MOST_LINKS = 40


@router.get("/cluster")
async def cluster_page(parts: Parts, caller: From) -> Response:
    """The cluster."""
    found = await measured(parts)
    return page(
        "cluster.html.j2",
        **await _nodes(parts, caller),
        devices=_devices(found.devices),
        links=_links(found.links),
    )


@router.get("/parts/cluster")
async def nodes(parts: Parts, caller: From) -> Response:
    """The nodes and notices alone."""
    return page("section_cluster.html.j2", **await _nodes(parts, caller))


async def _nodes(parts: Services, caller: Caller) -> dict[str, Any]:
    return {
        "cluster": await cluster(parts),
        "steers": caller.role == Role.CONTROL,
        "caller": caller,
    }


def _devices(devices: list[MeasuredDevice]) -> Table | None:
    if not devices:
        return None
    return Table(
        label="Devices, as profiles measured them",
        columns=(
            Column("Job"),
            Column("Rank", "number"),
            Column("Node"),
            Column("Device", "text"),
            Column("Memory", "number"),
            Column("Times", "number"),
        ),
        rows=tuple(
            (
                each.job,
                str(each.rank),
                each.node or "–",
                f"{each.name} ({each.kind})",
                size(each.memory_bytes),
                f"× {each.slowdown:.3g}",
            )
            for each in devices
        ),
    )


def _links(links: list[MeasuredLink]) -> Table | None:
    if not links:
        return None
    slowest = sorted(links, key=lambda each: each.bytes_per_s)
    left = len(links) - MOST_LINKS
    return Table(
        label="Links, as profiles measured them, the slowest first",
        columns=(
            Column("Job"),
            Column("From rank", "number"),
            Column("From node"),
            Column("To rank", "number"),
            Column("To node"),
            Column("Latency", "number"),
            Column("Bandwidth", "number"),
        ),
        rows=tuple(
            (
                each.job,
                str(each.source),
                each.source_node or "–",
                str(each.target),
                each.target_node or "–",
                seconds(each.latency_s),
                f"{size(each.bytes_per_s)}/s",
            )
            for each in slowest[:MOST_LINKS]
        ),
        more=f"{counted(left, 'faster link')} left out." if left > 0 else "",
    )
