"""Recap of a job's newest start for a runtime that did not see its events."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events.types import Event, Scaled
from orchestrator.history.job_view import JobView

RECAPPED_STEPS = 200
"""Newest steps whose times are told."""


def recap(view: JobView) -> tuple[Event, ...]:
    """The events of the newest start that a new runtime needs: notices, the requested size, and how long steps and
    regroups take.

    The requested size comes once for each command that is behind it: after a request for other spares, a number of
    ranks that was requested before may still be pending.
    """
    regrouped = [each.regrouped for each in view.recovery.regroupings if each.regrouped is not None]
    formed, recent = view.ranks.formed, sorted(view.steps)[-RECAPPED_STEPS:]
    steps = [view.steps[step] for step in recent if formed is None or step > formed.step]
    known = [event for event in (*_scaled(view), formed) if event is not None]
    return (*view.ranks.noticed, *regrouped[-1:], *known, *steps)


def _scaled(view: JobView) -> tuple[Scaled | None, ...]:
    scaled, entry = view.ranks.scaled, view.commands.get(view.resizing)
    if scaled is None or entry is None or entry.answer is not None or scaled.id == view.resizing:
        return (scaled,)
    return replace(scaled, id=view.resizing), scaled
