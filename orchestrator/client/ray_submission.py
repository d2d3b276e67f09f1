"""Submits a job to a cluster from outside and reads its log, over the HTTP interface that `ray job submit` uses.

It knows nothing of what the job does: `job_package` says what to send.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING

from orchestrator.client.blocking import finish
from orchestrator.client.job_package import JobPackage
from orchestrator.cluster.connection import check_store
from orchestrator.cluster.here import find
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

TRY_S = 10.0
"""Limit for the first answer of an address."""
LOOK_EVERY_S = 0.2
"""Between two looks at a job whose log has ended and whose end is not known yet."""
TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)
"""Loggers of Ray's client, which report each file that they leave out."""
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray prefers these environment variables to the address that it is given."""


class NotRay(JobError):
    """Something answers at an address, but no Ray cluster."""


class RayCluster:
    """A Ray cluster that takes jobs.

    Args:
        address: `auto` for the cluster of this machine, or the URL of Ray's dashboard, `http://HOST:8265`.
        say: receives which cluster `auto` was.

    Raises:
        NotRay: something else answers there.
        JobError: no cluster answers there, several may be meant, or it wants a token that is not here.
    """

    def __init__(self, address: str, say: Callable[[str], None] = lambda text: None) -> None:
        if address != "auto":
            check_ray(address)
        else:
            address = _store_or_url(say)
        self._client = _connect(address)
        self.address = self._client.get_address()
        """Its URL."""

    def submit(self, package: JobPackage) -> str:
        """Send a job and return its submission id; Ray starts it when it is ready.

        Raises:
            JobError: it was not accepted, such as a working directory that is too large.
        """
        id = f"{package.name}-{secrets.token_hex(4)}"
        try:
            return self._client.submit_job(
                entrypoint=package.command, submission_id=id, runtime_env=dict(package.runtime_env)
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise JobError(f"{self.address} did not take the job: {str(error).strip()}") from error

    def follow(self, id: str, show: Callable[[str], None]) -> JobDetails:
        """Pass the job's log to `show` as it grows until the job has ended, and return how it ended.

        Raises:
            JobError: the connection was lost; the job goes on.
        """
        import aiohttp

        try:
            # In a thread of its own, so that no library between here and the socket can swallow an interrupt.
            return finish(self._follow(id, show))
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            raise JobError(
                f"lost {self.address} while following {id} ({error}): the job goes on; see `ray job logs {id}"
                f" --address {self.address}`"
            ) from error

    async def _follow(self, id: str, show: Callable[[str], None]) -> JobDetails:
        async for text in self._client.tail_job_logs(id):
            show(text)
        while True:
            info = await asyncio.to_thread(self._client.get_job_info, id)
            if info.status.is_terminal():
                return info
            await asyncio.sleep(LOOK_EVERY_S)


def check_ray(url: str) -> None:
    """Check that a Ray cluster answers at `url`, whether it takes our token or not.

    Raises:
        NotRay: something else answers.
        JobError: nothing does, or `url` is no URL.
    """
    if not re.match(r"https?://[^/]", url):
        raise JobError(
            f"--address {url} is no URL: write http://HOST:8265, where Ray's dashboard is, or auto"
        )
    tried = f"{url.rstrip('/')}/api/version"
    try:
        with urllib.request.urlopen(tried, timeout=TRY_S) as answer:
            version = json.loads(answer.read(65536))
            ray = isinstance(version, dict) and "ray_version" in version
    except urllib.error.HTTPError as error:
        # Ray refuses in one line of plain text.
        with error:
            ray = error.code in (401, 403) and error.headers.get_content_type() == "text/plain"
    except (ValueError, HTTPException):  # no JSON, no HTTP
        ray = False
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise JobError(
            f"no cluster answers at {url}: tried GET {tried} for up to {TRY_S:g} s ({reason}). Start one with `ray"
            " start --head`, or see that its dashboard listens there (`ray start --head --dashboard-host=0.0.0.0`)"
        ) from error
    if not ray:
        raise NotRay(
            f"{url} answers, but not as a Ray cluster: tried GET {tried}; Ray's dashboard has port 8265"
        )


def _store_or_url(say: Callable[[str], None]) -> str:
    """Address that `auto` stands for: the URL that the environment names, or the control store of the only cluster."""
    for name in OVERRIDING:
        if (named := os.environ.get(name, "")).startswith(("http://", "https://")):
            check_ray(named)
            return named
    found = find("auto")
    check_store(found.address)
    say(f"the Ray cluster at {found.text}")
    return found.address


def _connect(address: str) -> JobSubmissionClient:
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _without(OVERRIDING):
            return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise JobError(
            f"the cluster at {address} asks for its token: set RAY_AUTH_MODE=token and have the token in RAY_AUTH_TOKEN"
            f" or in ~/.ray/auth_token; `ray get-auth-token` prints it on the cluster's head (it says:"
            f" {_reason(error)})"
        ) from error
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise JobError(
            f"no Ray cluster takes jobs at {address} ({_reason(error)}). Start one with `ray"
            " start --head`, or name its dashboard with --address http://HOST:8265"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of Ray's `error`."""
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Hide environment variables."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
