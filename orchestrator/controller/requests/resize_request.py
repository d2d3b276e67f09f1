"""Checks requests for another number of ranks, for leaving a node and for coming back, against job, plans and room.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.cluster.placement import Node
from orchestrator.events.types import Noticed, Scaled
from orchestrator.history.ranks_view import REQUEST, RanksView
from orchestrator.lifecycle.states import JobData, TargetSize
from planner.adapt.speeds import NONE_KNOWN, RankSlowdowns
from planner.plan import Plan, PlanError
from planner.search.replan import Replanner
from planner.wording import counted, named
from workers.actor import Home
from workers.config import ElasticConfig
from workers.protocol.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Ranks that a job has and may get."""

    elastic: ElasticConfig
    replicas: int
    pipelines: int
    """Pipelines that its ranks form, or formed before it lacked any."""
    size: TargetSize
    """Size as requested so far."""
    members: int
    """Ranks of the job that have a place and do not drain."""
    up: int
    """Ranks of the job that are up or starting and do not drain."""
    room: int
    """Number of further ranks that the cluster has room for."""


def scaled(
    ranks: int | None,
    spares: int | None,
    has: Capacity,
    *,
    pipelines: int | None = None,
    layers: int,
    id: str = "",
) -> Scaled:
    """Return the size that `ranks`, `pipelines` and `spares` ask for; None: as many as before.

    Args:
        ranks: of each pipeline; None with `pipelines`: those that there are, shared among the pipelines.
        id: of the command.

    Raises:
        JobError: they make no job, or the cluster has no room for them.
    """
    if ranks is None and spares is None and pipelines is None:
        raise JobError("scale to what? Give a number of ranks, of pipelines or of spares")
    elastic, asked = has.elastic, has.size.pipelines if pipelines is None else pipelines
    if pipelines is not None and not 0 <= pipelines <= has.replicas:
        raise JobError(
            f"{counted(pipelines, 'pipeline')} are asked for, and each executes at least one of the job's"
            f" {counted(has.replicas, 'replica')}: ask for 1 to {has.replicas}, or for 0 to leave it to the planner"
        )
    # If only the spares change, places without a rank need no room.
    resizes = ranks is not None or pipelines is not None
    count = asked or has.pipelines
    ranks = max(1, has.size.places // count) if ranks is None else ranks
    spares = has.size.spares if spares is None else spares
    if ranks < 1:
        raise JobError(f"a pipeline has at least 1 rank, and {ranks} are asked for")
    if spares < 0:
        raise JobError(f"{spares} spare ranks are asked for: ask for 0 or more")
    if ranks > layers:
        raise JobError(
            f"{ranks} ranks are asked for, and the model has {counted(layers, 'layer')}: each rank needs at least one,"
            f" so ask for {layers} at most"
        )
    if ranks * count < elastic.min_ranks:
        raise JobError(
            f"{counted(ranks * count, 'rank')} would be fewer than elastic.min_ranks = {elastic.min_ranks}, and it"
            " would wait for others: ask for more"
        )
    if spares and elastic.redundancy == "none":
        raise JobError(
            'elastic.redundancy = "none" ends the job with the first rank that is lost: spares would be of no use'
        )
    event = Scaled(ranks=ranks, spares=spares, places=ranks * count, id=id, pipelines=asked)
    before = (has.size.places if resizes else has.members) + has.size.spares
    wanted = (event.places if resizes else has.members) + event.spares
    if wanted > max(before, has.up + has.room):
        raise JobError(
            f"no room: {counted(wanted, 'rank')} would be needed, the job has {has.up}, and the cluster has room for"
            f" {has.room} more. Add nodes, or ask for fewer"
        )
    return event


def check_plan(job: JobData, replanner: Replanner, asked: Scaled, known: RankSlowdowns = NONE_KNOWN) -> None:
    """Check that a plan uses as many ranks as are asked for and fits their memory; takes tens of milliseconds.

    Args:
        known: the speeds of the job's ranks.

    Raises:
        JobError: there is none; says why.
    """
    places = asked.places
    there = [*job.membership.members, *sorted(job.membership.idle)][:places]
    wanted = replace(replanner, pipelines=asked.pipelines or None)
    try:
        plan = _plan_for(places, there, job, wanted, known)
    except PlanError as error:
        raise JobError(str(error)) from error
    if asked.pipelines not in (0, plan.pipeline_count):
        raise JobError(f"no plan for {counted(asked.pipelines, 'pipeline')}: {plan.reason}")
    if plan.world_size != places:
        raise JobError(
            f"a plan for {counted(places, 'rank')} would use {plan.world_size} of them ({plan.reason}): ask for"
            f" {plan.pipeline_ranks} per pipeline"
        )


def _plan_for(
    places: int, there: Sequence[int], job: JobData, replanner: Replanner, known: RankSlowdowns
) -> Plan:
    """The plan for the ranks `there` and as many new ones as `places` lacks.

    Raises:
        PlanError: there is none.
    """
    missing = places - len(there)
    domains = [*map(job.membership.domain, there)]
    domains += [f"new node {number}" for number in range(missing)]
    slowdowns = (*known.of(there), *(None,) * missing)
    plan, _ = replanner.plan_for(places, epoch=0, version=0, reason="", domains=domains, slowdowns=slowdowns)
    return plan


def nodes_of(homes: Mapping[int, Home], starting: Collection[str], cluster: Sequence[Node]) -> dict[str, str]:
    """Return id and host of each node on which the job has a rank.

    Args:
        homes: of the ranks that are up.
        starting: ids of the nodes on which others start.
        cluster: all its nodes.
    """
    known = {node.id: node.host for node in cluster}
    return {node: known.get(node, "") for node in starting} | {
        home.node: home.host for home in homes.values()
    }


def choose_node(name: str, ours: Mapping[str, str], cluster: Sequence[Node]) -> str:
    """Return the id of the job's node that `name` means: an id, the beginning of one, or a host.

    Args:
        ours: id and host of the nodes on which the job has a rank, up or starting.
        cluster: all its nodes.

    Raises:
        JobError: the job has no rank there, there is no such node, or it is more than one.
    """
    known = _listed(ours)
    if (found := _only(name, ours, "The job's nodes")) is not None:
        return found
    if any(name and (node.id.startswith(name) or node.host == name) for node in cluster):
        raise JobError(f"the job has no rank on node {name!r}: there is nothing to drain. Its nodes: {known}")
    raise JobError(f"there is no node {name!r}; the job's nodes: {known}")


def choose_drained(name: str, ranks: RanksView) -> Noticed:
    """Return the notice of the drained node that `name` means: an id, the beginning of one, or a host.

    Raises:
        JobError: no command drained that node, its ranks are still leaving, it is to go for another reason too, or it
            is more than one.
    """
    drained = {node: notice.host for node, notice in ranks.drained.items()}
    node = _only(name, drained, "Drained nodes")
    if node is None:
        raise JobError(
            f"node {name!r} is not drained: there is nothing to undo. Drained nodes: {_listed(drained)}"
        )
    if still := ranks.leaving(node):
        verb = "is" if len(still) == 1 else "are"
        raise JobError(
            f"{named('rank', sorted(still))} {verb} still leaving node {node[:12]}: undrain it once they have left"
        )
    for notice in ranks.noticed:
        if notice.node == node and notice.source not in (REQUEST, "sigterm"):
            raise JobError(
                f"node {node[:12]} is to go by a notice of {notice.source} too: no rank starts there any more"
            )
    return ranks.drained[node]


def _only(name: str, nodes: Mapping[str, str], kind: str) -> str | None:
    """The id of the one of `nodes` (id -> host) that `name` means; None if it means none.

    Raises:
        JobError: it means more than one; lists all as `kind`.
    """
    found = [node for node, host in nodes.items() if name and (node.startswith(name) or host == name)]
    if len(found) > 1:
        raise JobError(f"{name!r} means more than one node: give more of its id. {kind}: {_listed(nodes)}")
    return found[0] if found else None


def _listed(nodes: Mapping[str, str]) -> str:
    return ", ".join(f"{node[:12]} ({host})" for node, host in sorted(nodes.items())) or "none"


def check_refuge(
    ranks: frozenset[int],
    job: JobData,
    replanner: Replanner,
    has: Capacity,
    node: str,
    known: RankSlowdowns = NONE_KNOWN,
) -> None:
    """Check that the job can train without `ranks`, on the ranks that are left and those that have room elsewhere.

    Ranks start elsewhere only once the others have left: with `elastic.wait_s` = 0 the job would end before.

    Args:
        has: its `room` is without the node of `ranks`.
        known: the speeds of the job's ranks.

    Raises:
        JobError: it cannot; says why.
    """
    staying = job.membership.alive - job.membership.going - ranks
    waits = has.elastic.wait_s > 0
    left = len(staying) + (has.room if waits else 0)
    way_out = (
        "Add a node first" if waits else "elastic.wait_s = 0 waits for no others: scale to more spares first"
    )
    least = max(1, has.elastic.min_ranks)
    if left < least:
        raise JobError(
            f"nowhere to go: without node {node[:12]} the job has {counted(len(staying), 'rank')}, the cluster has room"
            f" for {has.room} elsewhere, and the job needs {least}. {way_out}"
        )
    count = min(left, has.size.places)
    try:
        _plan_for(count, sorted(staying)[:count], job, replanner, known)
    except PlanError as error:
        raise JobError(f"nowhere to go: {error}. {way_out}") from error
