"""Wording of controls: effect on the job, change to simulate or why there is none, advice on a refusal. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from dashboard.api.controls import Drain, Freeze, Move, Scale, Undrain
from dashboard.api.plans import Applied
from dashboard.service.problems import PlanMoving
from orchestrator.analysis.what_if import KEEP, Change, Impossible
from orchestrator.client.errors import CommandIdReused, JobError, NoController, PlanChanged, Refused
from orchestrator.history.job_view import JobView
from orchestrator.quantities import seconds
from orchestrator.spec.job_spec import Spec
from planner.plan import Plan, PlanError
from planner.search.layer_move import parse_layers, with_layers
from planner.wording import counted

NO_PLAN = "the job has no plan yet"


def plan_of(view: JobView) -> Plan | None:
    """The plan that the ranks follow, or are about to follow."""
    return view.followed or view.plan


def advice(error: JobError) -> str:
    """Advice on a refused control, for someone who has its button before them; empty if its detail or the general
    advice says so."""
    match error:
        case PlanMoving():
            return "Ask again once the job's page shows the layers in their new places."
        case PlanChanged(epoch=epoch, version=version):
            return f"The button now asks to replace plan {epoch}.{version}."
        case NoController():
            return "Submit the job again with resume: it goes on from its newest checkpoint."
        case Refused() | CommandIdReused():
            return "See the job's state before you ask again."
        case _:
            return ""


def checkpoint_says(view: JobView, body: object) -> str:
    written = [each for each in view.checkpoints if each.error is None]
    last = f" The last one took {seconds(written[-1].seconds)}." if written else ""
    return f"The job writes a checkpoint after the step in flight, beside training.{last}"


def cancel_now_says(view: JobView, body: object) -> str:
    saved = max((each.step for each in view.checkpoints if each.error is None), default=0)
    lost = max(0, view.step - saved)
    return (
        "The job ends at once, without a checkpoint:"
        f" {counted(lost, 'committed step')} since the newest checkpoint {'is' if lost == 1 else 'are'} lost."
    )


def move_says(view: JobView, body: Move) -> str:
    one = body.layers.isdecimal()
    return (
        f"{'Layer' if one else 'Layers'} {body.layers} {'moves' if one else 'move'} to rank {body.rank} while the job"
        " trains. The bits stay the same."
    )


def move_change(view: JobView, body: Move) -> Change | str:
    """The cut after the move.

    Raises:
        Impossible: the layers cannot go there; says which can.
    """
    plan, members = plan_of(view), view.ranks.members
    if plan is None:
        return NO_PLAN
    if body.rank not in members:
        there = ", ".join(map(str, sorted(members))) or "none"
        raise Impossible(f"rank {body.rank} has no place in the pipeline; ranks with a place: {there}")
    place = plan.place(members.index(body.rank)).rank
    try:
        return Change(cut=with_layers(plan, *parse_layers(body.layers), place).layers_per_stage)
    except PlanError as error:
        raise Impossible(str(error)) from error


def drain_says(view: JobView, body: Drain) -> str:
    there = _on_node(view, body.node)
    members = sorted(there & {*view.ranks.members})
    if not there:
        return f"The job has no ranks on {body.node}: there is nothing to drain."
    ranks = ", ".join(map(str, members)) or "none"
    return (
        f"The job leaves {body.node} within {seconds(body.deadline_s)}: the layers of its training ranks there"
        f" ({ranks}) move to ranks elsewhere, and it starts no ranks there until the node is undrained. Other jobs"
        " stay."
    )


def undrain_says(view: JobView, body: Undrain) -> str:
    drained = {node: notice.host for node, notice in view.ranks.drained.items()}
    if not any(node.startswith(body.node) or host == body.node for node, host in drained.items()):
        return f"The job was not asked to leave {body.node}: there is nothing to undo."
    return f"The job may start ranks on {body.node} again, once it lacks any."


def drain_change(view: JobView, body: Drain) -> Change | str:
    """Change to simulate: without the ranks that leave and that no spare replaces."""
    plan, there = plan_of(view), _on_node(view, body.node)
    lost = len(there & {*view.ranks.members}) - len(view.ranks.spares - there)
    if plan is None:
        return NO_PLAN
    if plan.pipeline_count != 1:
        return (
            f"the job has {plan.pipeline_count} pipelines, and how many the ranks that stay form is decided once they"
            " have left"
        )
    if lost >= plan.pipeline_ranks:
        return "no rank would be left, and the job waits until it has room elsewhere"
    return Change(ranks=plan.pipeline_ranks - lost) if lost > 0 else Change(cut=KEEP)


def scale_says(view: JobView, body: Scale) -> str:
    wanted = [counted(body.ranks, "rank") if body.ranks is not None else ""]
    wanted.append(counted(body.spares, "spare") if body.spares is not None else "")
    return (
        f"The job trains with {' and '.join(filter(None, wanted))} from now on: it shrinks at a commit, and grows once"
        " the new ranks are up. The bits stay the same."
    )


def scale_change(view: JobView, body: Scale) -> Change | str:
    if body.ranks is None:
        return "spares hold no layers and compute nothing, so that the step stays as it is"
    return Change(ranks=body.ranks)


def freeze_says(view: JobView, body: Freeze) -> str:
    if body.method == "none":
        return "Nothing is frozen any more, from a commit on. The log says so, and --replay repeats it."
    what = [f"method {body.method}" if body.method is not None else ""]
    what.append(f"r_max {body.r_max:g}" if body.r_max is not None else "")
    return (
        f"Freezing goes on with {' and '.join(filter(None, what))} from a commit on. This changes the trajectory; the"
        " log says from which step, and --replay repeats it."
    )


def freeze_change(view: JobView, body: Freeze) -> Change | str:
    """Change to simulate for the freeze program; what another method freezes is not known beforehand."""
    if plan_of(view) is None:
        return NO_PLAN
    section = {
        **view.freeze_section_at(view.step),
        **body.model_dump(include={"method", "r_max"}, exclude_none=True),
    }
    try:
        then = Spec.model_validate({**view.spec, "freeze": section}).freeze
    except ValidationError:
        return f"{body.method} is no freeze method"
    if then.timely:
        return Change(cut=KEEP, r_max=then.r_max)
    if body.r_max is not None:
        return f"r_max changes nothing with method {then.method}: only a timelyfreeze method has a budget"
    if then.method == "none":
        return Change(cut=KEEP, r_max=0.0)
    return f"{then.method} freezes what has settled, which only training shows"


def cut_says(view: JobView, body: Applied) -> str:
    plan = plan_of(view)
    cut = " + ".join(map(str, body.partition))
    today = " + ".join(map(str, plan.layers_per_stage)) if plan is not None else "none"
    return (
        f"The ranks take up {cut} layers per stage, in place of {today}, while the job trains."
        " The bits stay the same."
    )


def cut_change(view: JobView, body: Applied) -> Change | str:
    return Change(cut=tuple(body.partition))


def _on_node(view: JobView, node: str) -> set[int]:
    return {
        rank
        for rank, home in view.ranks.nodes.items()
        if home.startswith(node) or view.ranks.hosts.get(rank) == node
    }
