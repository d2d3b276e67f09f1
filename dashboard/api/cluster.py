"""The cluster: nodes, who uses them, which are leaving, past preemptions; measured devices and links."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fastapi import APIRouter

from dashboard.api.history import profile_in
from dashboard.api.models import Model
from dashboard.jobs.live_job import LiveJob
from dashboard.service.problems import Problem, documented
from dashboard.service.services import Parts
from orchestrator.client.cluster_state import NodeState
from orchestrator.client.errors import JobError
from orchestrator.events.wording import noticed_text
from orchestrator.history.job_view import JobView

router = APIRouter(tags=["cluster"], prefix="/cluster")

KEPT_NOTICES = 50


class User(Model):
    """A job's ranks on a node."""

    job: str
    ranks: list[int]


class NodeModel(Model):
    """A node."""

    id: str
    host: str
    head: bool
    alive: bool
    total: dict[str, float]
    """Resource -> amount; memory in bytes."""
    available: dict[str, float]
    users: list[User]
    draining: bool
    deadline_s: float | None
    """When it will be gone, in seconds since the Unix epoch; null if unknown, or if it stays."""
    leaving_jobs: list[str]
    """Jobs that are leaving it by a request or a notice of their own."""


class Notice(Model):
    """A notice that a node would leave."""

    job: str
    text: str


class ClusterModel(Model):
    """The cluster."""

    address: str
    nodes: list[NodeModel]
    notices: list[Notice]
    """What jobs were told of nodes leaving, oldest first per job."""


class Device(Model):
    """A rank's device, as the job's profile measured it."""

    job: str
    rank: int
    kind: str
    """`cpu`, `cuda` or `emulated`."""
    name: str
    memory_bytes: int
    """What the rank may use."""
    slowdown: float
    """Factor on the model's times on this device."""


class Link(Model):
    """A link between two ranks, as the job's profile measured it."""

    job: str
    source: int
    target: int
    latency_s: float
    bytes_per_s: float


class Measured(Model):
    """What the profiles of running jobs tell of devices and links."""

    devices: list[Device]
    links: list[Link]


@router.get("", responses=documented(401, 403, 409, 503))
async def cluster(parts: Parts) -> ClusterModel:
    """Nodes, who uses them, and which are leaving."""
    address = parts.settings.address or ""
    try:
        nodes = await parts.client.nodes()
    except (RuntimeError, ConnectionError) as error:
        raise Problem(503, f"the cluster at {address} does not answer: {error}", Retry_After="5") from None
    jobs = [job for job in parts.live.jobs() if not job.gone]
    return ClusterModel(
        address=address,
        nodes=[_node(node, jobs) for node in nodes],
        notices=[
            Notice(job=job.name, text=noticed_text(notice))
            for job in parts.live.jobs()
            for notice in job.view.ranks.noticed[-KEPT_NOTICES:]
        ],
    )


def _node(node: NodeState, jobs: Iterable[LiveJob]) -> NodeModel:
    users, leaving = [], []
    for job in jobs:
        ranks = sorted(rank for rank, home in job.view.ranks.nodes.items() if home == node.id)
        if ranks:
            users.append(User(job=job.name, ranks=ranks))
        if job.view.ranks.going & {*ranks}:
            leaving.append(job.name)
    return NodeModel(
        id=node.id,
        host=node.host,
        head=node.head,
        alive=node.alive,
        total=dict(node.total),
        available=dict(node.available),
        users=users,
        draining=node.draining,
        deadline_s=node.deadline_s,
        leaving_jobs=leaving,
    )


@router.get("/measured", responses=documented(401, 403, 409))
async def measured(parts: Parts) -> Measured:
    """Devices and links, as running jobs' profiles measured them."""
    parts.client  # noqa: B018  raises: there is no cluster
    devices: list[Device] = []
    links: list[Link] = []
    for job in parts.live.jobs():
        if job.gone:
            continue
        try:
            found = await parts.threads.read(partial(_measured, job.snapshot()))
        except JobError:
            continue
        devices += found.devices
        links += found.links
    return Measured(devices=devices, links=links)


def _measured(view: JobView) -> Measured:
    profile = profile_in(view.folder)
    if profile is None:
        return Measured(devices=[], links=[])
    found = profile.cluster
    return Measured(
        devices=[
            Device(
                job=view.job,
                rank=rank,
                kind=device.kind,
                name=device.name,
                memory_bytes=device.memory_bytes,
                slowdown=device.slowdown,
            )
            for rank, device in enumerate(found.devices)
        ],
        links=[
            Link(
                job=view.job,
                source=source,
                target=target,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
            for source, row in enumerate(found.links)
            for target, link in enumerate(row)
            if link is not None
        ],
    )
