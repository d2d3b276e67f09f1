"""Asks before a control acts: what will happen, what the simulator expects, and a button that sends it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated

from fastapi import Form, Path, Request, Response
from fastapi.responses import RedirectResponse
from markupsafe import Markup

from dashboard.api.controls import answer_to
from dashboard.api.models import JobName
from dashboard.pages.controls import CONTROLS, Control, Expected, expectation, simulates
from dashboard.pages.shown import Job, Shown, ShownJob, page_router
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller, Role
from dashboard.service.mistakes import KEY, NAME
from dashboard.service.problems import PlanMoving, ProblemAnswer, problem_of
from dashboard.service.services import From, Parts
from orchestrator.analysis.job_summary import plan_version
from orchestrator.client.errors import (
    CommandIdReused,
    ControllerSilent,
    JobError,
    NoController,
    PlanChanged,
    Refused,
)
from orchestrator.commands.command import JobCommand

router = page_router()

Name = Annotated[str, Path(pattern=NAME)]
Key = Annotated[str, Form(pattern=KEY)]


def _control(name: str, caller: Caller) -> Control:
    if name not in CONTROLS:
        raise ProblemAnswer(404, f"there is no control {name!r}", action=f"There are {', '.join(CONTROLS)}.")
    if caller.role != Role.CONTROL:
        raise ProblemAnswer(403, "the read token changes nothing")
    return CONTROLS[name]


@router.get("/jobs/{job}/controls/{name}")
async def ask(job: Job, name: Name, request: Request, caller: From) -> Response:
    """Confirmation page of a control: its effect, and a button that sends it."""
    control = _control(name, caller)
    given = dict(request.query_params)
    return await _asking(job, control, given, control.parse(given), caller, _new_key())


@router.post("/jobs/{job}/controls/{name}")
async def send(
    job: JobName, subject: Job, name: Name, key: Key, request: Request, parts: Parts, caller: From
) -> Response:
    """Send a control; then show the job, and among the controls sent to it what comes of this one."""
    control = _control(name, caller)
    form = await request.form()
    given = {field: value for field, value in form.items() if isinstance(value, str)}
    command = control.parse(given, id=key, by=caller.name)
    try:
        await answer_to(parts, job, command)
    except JobError as error:
        problem = problem_of(error)
        request.state.why = problem.detail
        problem.action = _advice(error) or problem.action
        # A refusal is kept under its key. Only where it is open whether the control has arrived, it is the same again.
        again = key if isinstance(error, ControllerSilent) else _new_key()
        if problem.version is not None:
            given["version"] = problem.version
        return await _asking(subject, control, given, command, caller, again, problem)
    return RedirectResponse(f"/jobs/{job}#controls", 303)


def _advice(error: JobError) -> str:
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


def _new_key() -> str:
    return secrets.token_hex(16)


async def _asking(
    subject: ShownJob,
    control: Control,
    given: Mapping[str, str],
    command: JobCommand,
    caller: Caller,
    key: str,
    problem: ProblemAnswer | None = None,
) -> Response:
    def made(shown: Shown) -> Markup:
        return rendered(
            "ask.html.j2",
            shown=shown,
            control=control,
            fields={name: value for name, value in given.items() if name in control.names},
            version=plan_version(shown.view),
            says=command.says(shown.view),
            expected=expectation(shown, command) if asks else Expected(""),
            key=key,
            problem=problem,
            caller=caller,
        )

    # A refusal is shown at once: what is expected has been read on the page before.
    asks = problem is None
    slow = asks and await subject.read(lambda shown: simulates(shown.view, command))
    text = await subject.read(made, simulates=slow)
    return html(text) if problem is None else html(text, problem.status, problem.headers)
