"""A job that chooses how to freeze (`freeze.method = "auto"`): when it does, by which gradients, and what is best.

Pure. What is chosen is asked for as a user would ask for it (`freeze_control.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from orchestrator.controller.requests.freeze_request import Running
from orchestrator.controller.requests.freezing_in_force import current_settings
from orchestrator.events.types import Event
from orchestrator.history.job_view import JobView
from planner.freeze.choice import FreezeOption, better, freeze_options
from planner.freeze.decision import FreezeQuestion, decide
from planner.freezing import AUTO, Phases
from planner.plan import PlanError
from planner.schedule.table_format import CSV_PREFIX
from planner.search.replan import Replanner
from planner.simulation.predict import predict
from workers.config import FreezeConfig
from workers.protocol.reports import FreezeStarted, StepReport

EVERY = 100
"""Steps between two choices."""
LAID_OUT = 8
"""Prefixes that are weighed with the pipelines laid out anew for them: each takes a search."""


@dataclass(frozen=True)
class Chosen:
    """Other settings, and why."""

    prefix: int
    """0: those of the freeze program."""
    reason: str


def due(event: Event, spec: FreezeConfig, view: JobView) -> bool:
    """Whether the job is to choose, now that `event` is logged: once its program has been solved, also for new times,
    and every `EVERY` steps from then on."""
    if not isinstance(event, FreezeStarted | StepReport) or (newest := view.freeze.newest) is None:
        return False
    control, since = newest.control, newest.start
    if (control is not None and control.phases is not None and not control.solved) or since is None:
        return False
    if isinstance(event, FreezeStarted):
        at_once = control is None or not control.chosen
    else:
        at_once = event.step >= since and (event.step + 1 - since) % EVERY == 0
    return at_once and chooses(spec, view)


def chooses(spec: FreezeConfig, view: JobView) -> bool:
    """Whether the job chooses its method itself."""
    return current_settings(spec, view).chooses


def chosen(job: Running) -> Chosen | None:
    """The settings that the job is to freeze by from now on; None: those that it has. Solves and simulates: takes
    seconds."""
    now, newest, energies = (
        current_settings(job.spec, job.view),
        job.view.freeze.newest,
        job.view.freeze.energies,
    )
    if job.replanner.profile is None or not any(energies) or job.plan.schedule.startswith(CSV_PREFIX):
        return None

    plan, schedule = job.whole
    layers = plan.layers[-1][1]
    laid_out = {0, *(layers * part // (LAID_OUT + 1) for part in range(1, LAID_OUT + 1))}
    if job.spec.pack == "off":
        laid_out = set[int]()

    def step_s(prefix: int) -> float:
        replanner = replace(job.replanner, frozen=prefix, released=0, kept=0)
        as_is_s = predict(replanner.profile_on(job.domains, job.slowdowns), plan, schedule).step_s
        return (
            min(as_is_s, _best_step_s(replanner, job.domains, job.slowdowns))
            if prefix in laid_out
            else as_is_s
        )

    question = FreezeQuestion(
        plan=plan,
        schedule=schedule,
        phases=Phases(warm_up=0, monitoring=2, ramp=2),
        r_max=AUTO,
        least_update=job.spec.least_update if now.least_update is None else now.least_update,
        adaptive=job.adaptive,
        energies=energies,
        confirmed=job.view.freeze.confirmed,
        profile=replace(job.replanner, frozen=0, released=0, kept=0).profile_on(job.domains, job.slowdowns),
    )
    prefix = 0 if job.view.freeze.prefix is None else job.view.freeze.prefix.layers
    # What ranks follow, or would be given.
    ratios = newest.ratios if newest is not None and now.method == AUTO else decide(question, ()).ratios
    found = [*freeze_options(question, ratios, step_s, least=_asked_least(job))]
    best = better(found, prefix)
    return None if best is None else Chosen(best.prefix, reason(best, found, prefix))


@lru_cache(maxsize=2 * LAID_OUT)
def _best_step_s(
    replanner: Replanner, domains: tuple[str, ...], slowdowns: tuple[float | None, ...] | None
) -> float:
    """The predicted step of the best plan; infinite if there is none."""
    ranks = len(domains)
    try:
        plan, _ = replanner.plan_for(
            ranks, epoch=0, version=0, reason="", domains=domains, slowdowns=slowdowns
        )
    except PlanError:
        return math.inf
    return math.inf if plan.predicted_step_s is None else plan.predicted_step_s


def _asked_least(job: Running) -> float:
    """The least update that someone asked for: the job's own bounds are of ratios, which cost more than they seem."""
    asked = [plan.control for _, plan in sorted(job.view.freeze.plans.items()) if plan.control is not None]
    given = [each.least_update for each in asked if each.least_update is not None and not each.chosen]
    return given[-1] if given else job.spec.least_update


def reason(best: FreezeOption, found: Sequence[FreezeOption], now: int) -> str:
    """Why `best` is chosen, in words."""
    time = f"the same loss is predicted to take {best.time:.2f} of the time without freezing"
    before = next((each for each in found if each.prefix == now), None)
    return time if before is None else f"{time}, and {before.time:.2f} as before"


def settings_of(choice: Chosen) -> dict[str, Any]:
    """The request that asks for `choice`."""
    return {"method": "prefix", "prefix": choice.prefix} if choice.prefix else {"method": AUTO}
