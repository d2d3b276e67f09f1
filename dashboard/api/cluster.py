"""The cluster: nodes, who uses them, which are leaving, past preemptions; measured devices and links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial

from fastapi import APIRouter

from dashboard.api.examples import CLUSTER, MEASURED, example
from dashboard.api.history import profile_in
from dashboard.api.models import StrictModel
from dashboard.jobs.live_job import LiveJob
from dashboard.service.problems import ProblemAnswer, documented
from dashboard.service.services import Parts
from orchestrator.client.cluster_state import NodeState
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView
from orchestrator.history.ranks_view import REQUEST, Departure

router = APIRouter(tags=["cluster"], prefix="/cluster")

KEPT_PREEMPTIONS = 50


class User(StrictModel):
    """A job's ranks on a node."""

    job: str
    ranks: list[int]
    leaving: bool
    """Whether they are leaving it, by a request or a notice of the job's own."""
    deadline_s: float | None
    """When the node will be gone, as the job knows, in seconds since the Unix epoch; null if unknown, or if the ranks
    stay."""


class NodeModel(StrictModel):
    """A node."""

    id: str
    host: str
    head: bool
    alive: bool
    total: dict[str, float]
    """Resource -> amount; memory in bytes."""
    available: dict[str, float]
    users: list[User]
    drained_by: list[str]
    """Jobs that were asked to leave it, have left, and start no ranks there until they are told to undrain it."""
    draining: bool
    deadline_s: float | None
    """When it will be gone, as the cluster knows, in seconds since the Unix epoch; null if unknown, or if it stays."""


class PreemptedRanks(StrictModel):
    """Ranks that a job lost with their node, or is about to lose: by a notice, or without one."""

    time_s: float
    """When the notice came, or the job lost its ranks, in seconds since the Unix epoch."""
    job: str
    noticed: bool
    text: str
    """Ranks, their node and the notice given, in words."""


class ClusterModel(StrictModel, json_schema_extra=example(CLUSTER)):
    """The cluster."""

    address: str
    nodes: list[NodeModel]
    preemptions: list[PreemptedRanks]
    """The newest of all jobs, newest last. Drains that users requested are none."""


class MeasuredDevice(StrictModel):
    """A rank's device, as the job's profile measured it."""

    job: str
    rank: int
    node: str
    """Address of the rank's node; of a rank that is gone, the name of the machine that was measured; empty if neither
    is known."""
    kind: str
    """`cpu`, `cuda` or `emulated`."""
    name: str
    memory_bytes: int
    """Memory that the rank may use."""
    slowdown: float
    """Factor on the model's times on this device."""


class MeasuredLink(StrictModel):
    """A link between two ranks, as the job's profile measured it."""

    job: str
    source: int
    source_node: str
    """Node of the source rank, as in `MeasuredDevice.node`."""
    target: int
    target_node: str
    latency_s: float
    bytes_per_s: float


class MeasuredHardware(StrictModel, json_schema_extra=example(MEASURED)):
    """Devices and links, as running jobs' profiles measured them."""

    devices: list[MeasuredDevice]
    links: list[MeasuredLink]


@router.get("", responses=documented(401, 403, 409, 503))
async def cluster(parts: Parts) -> ClusterModel:
    """Nodes, who uses them, and which are leaving."""
    address = parts.settings.address or ""
    try:
        nodes = await parts.client.nodes()
    except (RuntimeError, ConnectionError) as error:
        raise ProblemAnswer(
            503, f"the cluster at {address} does not answer: {error}", Retry_After="5"
        ) from None
    jobs = [job for job in parts.live.jobs() if not job.gone]
    return ClusterModel(
        address=address,
        nodes=[_node(node, jobs) for node in nodes],
        preemptions=preemptions([job.view for job in parts.live.jobs()]),
    )


def preemptions(views: Iterable[JobView]) -> list[PreemptedRanks]:
    """The newest preemptions of jobs, newest last."""
    found = [
        PreemptedRanks(time_s=each.time_s, job=view.job, noticed=True, text=each.event.sentence)
        for view in views
        for each in view.ranks.notices
        if each.event.source != REQUEST
    ]
    found += [
        PreemptedRanks(time_s=each.time_s, job=view.job, noticed=False, text=_lost_text(each))
        for view in views
        for each in view.ranks.departures
        if not each.noticed
    ]
    return sorted(found, key=lambda each: each.time_s)[-KEPT_PREEMPTIONS:]


def _lost_text(departure: Departure) -> str:
    numbers = ", ".join(map(str, departure.ranks))
    ranks = f"rank {numbers} was" if len(departure.ranks) == 1 else f"ranks {numbers} were"
    return f"{ranks} lost{f' on {departure.host}' if departure.host else ''} without notice"


def _node(node: NodeState, jobs: Sequence[LiveJob]) -> NodeModel:
    users = [user for job in jobs if (user := _user(job, node.id)) is not None]
    there = {user.job for user in users}
    return NodeModel(
        **asdict(node),
        users=users,
        drained_by=[job.name for job in jobs if node.id in job.view.ranks.drained and job.name not in there],
    )


def _user(job: LiveJob, node: str) -> User | None:
    """A job on a node; None if it has no ranks there."""
    known = job.view.ranks
    ranks = sorted(rank for rank, home in known.nodes.items() if home == node)
    if not ranks:
        return None
    leaving = bool(known.going & {*ranks})
    deadlines = [each.deadline_s for each in known.notices if each.event.node == node]
    return User(
        job=job.name,
        ranks=ranks,
        leaving=leaving,
        deadline_s=deadlines[-1] if leaving and deadlines else None,
    )


@router.get("/measured", responses=documented(401, 403, 409))
async def measured(parts: Parts) -> MeasuredHardware:
    """Devices and links, as running jobs' profiles measured them."""
    parts.client  # noqa: B018  raises: there is no cluster
    devices: list[MeasuredDevice] = []
    links: list[MeasuredLink] = []
    for job in parts.live.jobs():
        if job.gone:
            continue
        try:
            found = await parts.threads.read(partial(_measured, job.snapshot()))
        except JobError:
            continue
        devices += found.devices
        links += found.links
    return MeasuredHardware(devices=devices, links=links)


def _measured(view: JobView) -> MeasuredHardware:
    profile = profile_in(view.folder)
    if profile is None:
        return MeasuredHardware(devices=[], links=[])
    found, hosts = profile.cluster, view.ranks.hosts
    nodes = [hosts.get(rank, device.machine) for rank, device in enumerate(found.devices)]
    return MeasuredHardware(
        devices=[
            MeasuredDevice(
                job=view.job,
                rank=rank,
                node=nodes[rank],
                kind=device.kind,
                name=device.name,
                memory_bytes=device.memory_bytes,
                slowdown=device.slowdown,
            )
            for rank, device in enumerate(found.devices)
        ],
        links=[
            MeasuredLink(
                job=view.job,
                source=source,
                source_node=nodes[source],
                target=target,
                target_node=nodes[target],
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
            for source, row in enumerate(found.links)
            for target, link in enumerate(row)
            if link is not None
        ],
    )
