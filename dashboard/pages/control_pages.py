"""Asks before a control acts: what will happen, what the simulator expects, and a button that sends it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Form, Path, Request, Response
from fastapi.responses import RedirectResponse
from markupsafe import Markup

from dashboard.api.models import JobName, Model
from dashboard.pages.control_form import Control, Expected, Sending, expectation, simulates
from dashboard.pages.control_words import advice
from dashboard.pages.controls import CONTROLS
from dashboard.pages.shown import Job, Shown, Subject, page_router
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller, Role
from dashboard.service.mistakes import KEY, NAME
from dashboard.service.problems import Problem, problem_of
from dashboard.service.services import From, Parts
from orchestrator.analysis.job_summary import plan_version
from orchestrator.client.errors import ControllerSilent, JobError

router = page_router()

Name = Annotated[str, Path(pattern=NAME)]
Key = Annotated[str, Form(pattern=KEY)]


def _control(name: str, caller: Caller) -> Control[Any]:
    if name not in CONTROLS:
        raise Problem(404, f"there is no control {name!r}", action=f"There are {', '.join(CONTROLS)}.")
    if caller.role != Role.CONTROL:
        raise Problem(403, "the read token changes nothing")
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
    body = control.parse(given)
    try:
        await control.send(Sending(job, parts, caller, key), body)
    except JobError as error:
        problem = problem_of(error)
        request.state.why = problem.detail
        problem.action = advice(error) or problem.action
        # A refusal is kept under its key. Only where it is open whether the control has arrived, it is the same again.
        again = key if isinstance(error, ControllerSilent) else _new_key()
        if problem.version is not None:
            given["version"] = problem.version
        return await _asking(subject, control, given, body, caller, again, problem)
    return RedirectResponse(f"/jobs/{job}#controls", 303)


def _new_key() -> str:
    return secrets.token_hex(16)


async def _asking(
    subject: Subject,
    control: Control[Any],
    given: Mapping[str, str],
    body: Model,
    caller: Caller,
    key: str,
    problem: Problem | None = None,
) -> Response:
    def made(shown: Shown) -> Markup:
        return rendered(
            "ask.html.j2",
            shown=shown,
            control=control,
            fields={name: value for name, value in given.items() if name in control.model.model_fields},
            version=plan_version(shown.view),
            says=control.says(shown.view, body),
            expected=expectation(control, shown, body) if asks else Expected(""),
            key=key,
            problem=problem,
            caller=caller,
        )

    # A refusal is shown at once: what is expected has been read on the page before.
    asks = problem is None
    slow = asks and await subject.read(lambda shown: simulates(control, shown.view, body))
    text = await subject.read(made, simulates=slow)
    return html(text) if problem is None else html(text, problem.status, problem.headers)
