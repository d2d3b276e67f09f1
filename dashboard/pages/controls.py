"""The controls of a job. Each sends through the same function as its REST route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field as Limited
from pydantic import field_validator

from dashboard.api import controls
from dashboard.api.controls import Drain, Freeze, Move, Scale
from dashboard.api.models import Answer, Model
from dashboard.pages.control_form import Control, Field, Sending
from orchestrator.analysis.what_if import KEEP, Change
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView
from orchestrator.quantities import seconds
from planner.wording import counted


class Nothing(Model):
    """No fields."""


class Cut(Model):
    """A cut to apply."""

    partition: tuple[int, ...] = Limited(min_length=1, max_length=4096)
    """Layers per stage."""
    version: str | None = Limited(default=None, pattern=r"^\d{1,9}\.\d{1,9}$")
    """Of the plan that it replaces."""

    @field_validator("partition", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.replace("+", ",").replace(" ", "").split(",") if isinstance(value, str) else value


def _checkpoint_says(view: JobView, body: Nothing) -> str:
    written = [each for each in view.checkpoints if each.error is None]
    last = f" The last one took {seconds(written[-1].seconds)}." if written else ""
    return f"The job writes a checkpoint after the step in flight, beside training.{last}"


def _move_change(view: JobView, body: Move) -> Change | None:
    """The cut after the move, if the layers are at the edge of a stage of theirs."""
    plan = view.followed or view.plan
    if plan is None or body.rank >= plan.pipeline_ranks or plan.stages != plan.pipeline_ranks:
        return None
    first, _, last = body.layers.partition("-")
    moved = range(int(first), int(last or first) + 1)
    stage = plan.stage_ranks.index(body.rank)
    owners = [stage if layer in moved else plan.stage_of_layer(layer) for layer in range(plan.layers[-1][1])]
    if owners != sorted(owners) or len(set(owners)) != plan.stages:
        raise JobError(
            f"layers {body.layers} are not beside those of rank {body.rank}, or leave a rank empty"
        )
    return Change(cut=tuple(owners.count(each) for each in range(plan.stages)))


def _on_node(view: JobView, node: str) -> set[int]:
    return {
        rank
        for rank, home in view.ranks.nodes.items()
        if home.startswith(node) or view.ranks.hosts.get(rank) == node
    }


def _drain_says(view: JobView, body: Drain) -> str:
    there = _on_node(view, body.node)
    members = sorted(there & {*view.ranks.members})
    if not there:
        return f"The job has no ranks on {body.node}: it starts none there for {seconds(body.deadline_s)}."
    ranks = ", ".join(map(str, members)) or "none"
    return (
        f"The job leaves {body.node} within {seconds(body.deadline_s)}: the layers of its training ranks there"
        f" ({ranks}) move to ranks elsewhere, and it starts no ranks there in that time. Other jobs stay."
    )


def _drain_change(view: JobView, body: Drain) -> Change | None:
    plan, there = view.followed or view.plan, _on_node(view, body.node)
    lost = len(there & {*view.ranks.members}) - len(view.ranks.spares - there)
    if plan is None or plan.pipeline_count != 1:
        return None
    if lost >= plan.pipeline_ranks:
        raise JobError("no rank would be left: the job waits until it has room elsewhere")
    return Change(ranks=plan.pipeline_ranks - lost) if lost > 0 else Change(cut=KEEP)


def _scale_says(view: JobView, body: Scale) -> str:
    wanted = [counted(body.ranks, "rank") if body.ranks is not None else ""]
    wanted.append(counted(body.spares, "spare") if body.spares is not None else "")
    return (
        f"The job trains with {' and '.join(filter(None, wanted))} from now on: it shrinks at a commit, and grows once"
        " the new ranks are up. The bits stay the same."
    )


def _scale_change(view: JobView, body: Scale) -> Change | None:
    return Change(ranks=body.ranks) if body.ranks is not None else None


def _freeze_says(view: JobView, body: Freeze) -> str:
    if body.method == "none":
        return "Nothing is frozen any more, from a commit on. The log says so, and --replay repeats it."
    what = [f"method {body.method}" if body.method is not None else ""]
    what.append(f"r_max {body.r_max:g}" if body.r_max is not None else "")
    return (
        f"Freezing goes on with {' and '.join(filter(None, what))} from a commit on. This changes the trajectory; the"
        " log says from which step, and --replay repeats it."
    )


def _freeze_change(view: JobView, body: Freeze) -> Change | None:
    if body.method == "none":
        return Change(cut=KEEP, r_max=0.0)
    return Change(cut=KEEP, r_max=body.r_max) if body.r_max is not None else None


def _plan_says(view: JobView, body: Cut) -> str:
    plan = view.followed or view.plan
    cut = " + ".join(map(str, body.partition))
    today = " + ".join(str(stop - first) for first, stop in plan.layers) if plan is not None else "none"
    return (
        f"The ranks take up {cut} layers per stage, in place of {today}, while the job trains."
        " The bits stay the same."
    )


def _plan_change(view: JobView, body: Cut) -> Change | None:
    return Change(cut=body.partition)


def _apply(to: Sending, body: Cut) -> Awaitable[Answer]:
    base = None
    if body.version is not None:
        epoch, version = body.version.split(".")
        base = (int(epoch), int(version))
    sending = to.parts.client.apply(to.job, body.partition, base=base, id=to.key, by=to.by.name)
    return controls.outcome_of(to.parts, sending, wait_s=0.0)


def _words(text: str) -> Callable[[JobView, Nothing], str]:
    return lambda view, body: text


def _unsaved(view: JobView) -> int:
    saved = max((each.step for each in view.checkpoints if each.error is None), default=0)
    return max(0, view.step - saved)


_ALL: tuple[Control[Any], ...] = (
    Control(
        name="pause",
        button="Pause",
        model=Nothing,
        says=_words(
            "The job stops after the step in flight, writes a checkpoint and gives its ranks back to the cluster."
            " It trains on when it is resumed."
        ),
        send=lambda to, body: controls.pause(to.job, to.parts, to.by, to.key),
    ),
    Control(
        name="resume",
        button="Resume",
        model=Nothing,
        says=_words(
            "The paused job asks the cluster for its ranks and trains on from its checkpoint, with the same bits."
        ),
        send=lambda to, body: controls.resume(to.job, to.parts, to.by, to.key),
    ),
    Control(
        name="checkpoint",
        button="Checkpoint",
        model=Nothing,
        says=_checkpoint_says,
        send=lambda to, body: controls.checkpoint(to.job, to.parts, to.by, to.key),
    ),
    Control(
        name="stop",
        button="Stop",
        model=Nothing,
        says=_words(
            "The job ends after the step in flight, with a checkpoint. Submitting it again with resume goes on."
        ),
        send=lambda to, body: controls.cancel(to.job, to.parts, to.by, None, to.key),
        danger=True,
    ),
    Control(
        name="abort",
        button="Abort",
        model=Nothing,
        says=lambda view, body: (
            "The job ends at once, without a checkpoint:"
            f" {counted(_unsaved(view), 'committed step')} since the newest checkpoint are lost."
        ),
        send=lambda to, body: controls.cancel(to.job, to.parts, to.by, controls.Cancel(abort=True), to.key),
        danger=True,
    ),
    Control(
        name="move",
        button="Move layers",
        model=Move,
        fields=(
            Field("layers", "Layers", hint="such as 3 or 3-4"),
            Field("rank", "To pipeline rank", "number"),
        ),
        says=lambda view, body: (
            f"Layers {body.layers} move to pipeline rank {body.rank} while the job trains."
        ),
        change=_move_change,
        send=lambda to, body: controls.move(to.job, body, to.parts, to.by, to.key),
    ),
    Control(
        name="scale",
        button="Scale",
        model=Scale,
        fields=(Field("ranks", "Ranks of the pipeline", "number"), Field("spares", "Spares", "number")),
        says=_scale_says,
        change=_scale_change,
        send=lambda to, body: controls.scale(to.job, body, to.parts, to.by, to.key),
    ),
    Control(
        name="freeze",
        button="Freeze",
        model=Freeze,
        fields=(
            Field("method", "Method", hint="timelyfreeze, none, …"),
            Field("r_max", "r_max", hint="0 to 1"),
        ),
        says=_freeze_says,
        change=_freeze_change,
        send=lambda to, body: controls.freeze(to.job, body, to.parts, to.by, to.key),
    ),
    Control(
        name="drain",
        button="Drain a node",
        model=Drain,
        fields=(
            Field("node", "Node", hint="id or address"),
            Field("deadline_s", "Within, s", "number", hint="30 if empty"),
        ),
        says=_drain_says,
        change=_drain_change,
        send=lambda to, body: controls.drain(to.job, body, to.parts, to.by, to.key),
        danger=True,
    ),
    Control(
        name="plan",
        button="Apply a cut",
        model=Cut,
        fields=(Field("partition", "Layers per stage", hint="such as 3+2+1+2"),),
        says=_plan_says,
        change=_plan_change,
        send=_apply,
    ),
)
CONTROLS = {control.name: control for control in _ALL}
"""The controls of a job, by name."""
