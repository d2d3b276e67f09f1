"""Submits a job to a Freshet service, over POST /api/v1/jobs: the way of `freshet submit` to a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from orchestrator.client.opening import opened
from orchestrator.client.submit import SubmittedJob
from orchestrator.spec.job_spec import load

ANSWER_S = 5.0


def answers_as_service(address: str) -> bool:
    """Whether a Freshet service answers at the URL `address`. Sends no token: a service refuses in its own words, and
    Ray's dashboard, which has URLs too, knows no such path."""
    if not address.startswith(("http://", "https://")):
        return False
    try:
        answer = httpx.get(f"{address.rstrip('/')}/api/v1/jobs", timeout=ANSWER_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.headers.get("content-type", "").startswith("application/problem+json")


def submit_over_rest(
    spec_path: Path, overrides: Sequence[str], address: str, *, resume: bool, say: Callable[[str], None]
) -> SubmittedJob:
    """Submit the job of the spec at `spec_path`, and return once a controller has accepted it. The service measures,
    plans and starts it; files that the spec names are those of the service's machine.

    Args:
        address: URL of the service.
        resume: continue from the newest checkpoint in the job's folder.
        say: receives what happens, in words.

    Raises:
        JobError: the spec has an unknown key or a wrong value, or the service refuses it or does not answer.
    """
    spec = load(spec_path, overrides)
    say(f"submitting {spec.job.name} to {address}: it is measured and planned there")
    with opened(address) as client:
        job = client.submit(spec, resume=resume)
    say(f"{job.name} trains in {job.folder}: {address.rstrip('/')}/jobs/{job.name}")
    return job
