"""The controls of a job: the form of each, and the REST route that it sends through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import field_validator

from dashboard.api import controls, plans
from dashboard.api.controls import Drain, Freeze, Move, Scale, Undrain
from dashboard.api.models import Model
from dashboard.api.plans import Applied
from dashboard.pages.control_form import Choice, Control, Field
from dashboard.pages.control_words import (
    cancel_now_says,
    checkpoint_says,
    cut_change,
    cut_says,
    drain_change,
    drain_says,
    freeze_change,
    freeze_says,
    move_change,
    move_says,
    scale_change,
    scale_says,
    undrain_says,
)
from dashboard.pages.shown import Shown
from orchestrator.history.job_view import JobView
from orchestrator.spec.freeze_phases import METHODS
from planner.wording import named_or_counted


class Nothing(Model):
    """No fields."""


class Cut(Applied):
    """A cut to apply, as a form has it: `3+2+1`."""

    @field_validator("partition", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.replace("+", ",").replace(" ", "").split(",") if isinstance(value, str) else value


def _nodes(view: JobView) -> list[Choice]:
    """The nodes that the job has ranks on."""
    ranks = view.ranks
    there: dict[str, list[int]] = {}
    for rank in sorted(ranks.alive):
        if node := ranks.nodes.get(rank):
            there.setdefault(node, []).append(rank)
    return [
        Choice(node, f"{ranks.hosts.get(of[0]) or 'node'} ({node[:8]}): {named_or_counted('rank', of)}")
        for node, of in there.items()
    ]


def _drained(view: JobView) -> list[Choice]:
    """The nodes that the job was asked to leave."""
    notices = view.ranks.drained.items()
    return [Choice(node, f"{notice.host or 'node'} ({node[:8]})") for node, notice in notices]


def _members(view: JobView) -> list[Choice]:
    """The ranks that train."""
    return [Choice(str(rank), str(rank)) for rank in sorted(view.ranks.members)]


def _methods(view: JobView) -> list[Choice]:
    """The freeze methods."""
    now = view.freeze_section_at(view.step).get("method", "none")
    return [Choice(method, f"{method} (now)" if method == now else method) for method in METHODS]


def _words(text: str) -> Callable[[JobView, Nothing], str]:
    return lambda view, body: text


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
        says=checkpoint_says,
        send=lambda to, body: controls.checkpoint(to.job, to.parts, to.by, to.key),
    ),
    Control(
        name="cancel",
        button="Cancel",
        model=Nothing,
        says=_words(
            "The job ends after the step in flight, with a checkpoint. Submitting it again with resume goes on."
        ),
        send=lambda to, body: controls.cancel(to.job, to.parts, to.by, None, to.key),
        danger=True,
    ),
    Control(
        name="cancelnow",
        button="Cancel now",
        model=Nothing,
        says=cancel_now_says,
        send=lambda to, body: controls.cancel(to.job, to.parts, to.by, controls.Cancel(abort=True), to.key),
        danger=True,
    ),
    Control(
        name="move",
        button="Move layers",
        model=Move,
        fields=(
            Field("layers", "Layers", hint="such as 3 or 3-4", needed=True),
            Field("rank", "To rank", needed=True, choices=_members),
        ),
        says=move_says,
        change=move_change,
        send=lambda to, body: controls.move(to.job, body, to.parts, to.by, key=to.key),
    ),
    Control(
        name="scale",
        button="Scale",
        model=Scale,
        fields=(Field("ranks", "Ranks of the pipeline", "number"), Field("spares", "Spares", "number")),
        says=scale_says,
        change=scale_change,
        send=lambda to, body: controls.scale(to.job, body, to.parts, to.by, key=to.key),
    ),
    Control(
        name="freeze",
        button="Freeze",
        model=Freeze,
        fields=(
            Field("method", "Method", choices=_methods),
            Field("r_max", "r_max", "number", hint="0 to 1", step="any", most="1"),
        ),
        says=freeze_says,
        change=freeze_change,
        send=lambda to, body: controls.freeze(to.job, body, to.parts, to.by, key=to.key),
    ),
    Control(
        name="drain",
        button="Drain a node",
        model=Drain,
        fields=(
            Field("node", "Node", needed=True, choices=_nodes),
            Field("deadline_s", "Within, s", "number", hint="30 if empty"),
        ),
        says=drain_says,
        change=drain_change,
        send=lambda to, body: controls.drain(to.job, body, to.parts, to.by, key=to.key),
        danger=True,
    ),
    Control(
        name="undrain",
        button="Undrain a node",
        model=Undrain,
        fields=(Field("node", "Node", needed=True, choices=_drained),),
        says=undrain_says,
        send=lambda to, body: controls.undrain(to.job, body, to.parts, to.by, key=to.key),
    ),
    Control(
        name="plan",
        button="Apply a cut",
        model=Cut,
        fields=(Field("partition", "Layers per stage", hint="such as 3+2+1+2", needed=True),),
        says=cut_says,
        change=cut_change,
        send=lambda to, body: plans.apply(to.job, body, to.parts, to.by, key=to.key),
    ),
)
CONTROLS = {control.name: control for control in _ALL}
"""The controls of a job, by name."""


@dataclass(frozen=True)
class ControlsPart:
    """The controls on a job's page."""

    simple: tuple[Control[Any], ...]
    """Controls that need nothing but a button."""
    forms: tuple[tuple[Control[Any], tuple[tuple[Field, Sequence[Choice]], ...]], ...]
    """The others, each with its fields and what there is to choose from."""


def controls_part(shown: Shown) -> ControlsPart | None:
    """The controls for who looks; None for those who may not steer, and for a job that has ended."""
    if not shown.steers:
        return None
    view = shown.view
    return ControlsPart(
        simple=tuple(
            control
            for control in _ALL
            if not control.fields and control.name != ("pause" if view.state == "paused" else "resume")
        ),
        forms=tuple(
            (
                control,
                tuple((field, field.choices(view) if field.choices else ()) for field in control.fields),
            )
            for control in _ALL
            if control.fields and (control.name != "undrain" or view.ranks.drained)
        ),
    )
