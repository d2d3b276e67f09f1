"""The errors that a client of jobs can get, in one place for those who tell people of them, or send them over REST."""

from __future__ import annotations

from orchestrator.history.command_table import CommandIdReused
from orchestrator.history.proposal import PlanChanged
from workers.protocol.errors import JobError

__all__ = [
    "ClusterSilent",
    "CommandIdReused",
    "ControllerSilent",
    "JobError",
    "NoController",
    "NoSuchJob",
    "PlanChanged",
    "Refused",
    "ServiceError",
    "ServiceUnreachable",
    "problem_type",
]


class NoSuchJob(JobError):
    """The cluster has no job of that name."""


class NoController(JobError):
    """A job's controller is gone and will not be replaced."""


class ControllerSilent(JobError):
    """A job's controller does not answer: it hangs, or Ray is restarting it."""


class ClusterSilent(ControllerSilent):
    """The cluster does not answer, and with it no controller: it is gone, or its head is being restarted."""


class Refused(JobError):
    """A job's controller refuses; the message says why."""


class ServiceUnreachable(JobError):
    """No Freshet service answers at the address."""


class ServiceError(JobError):
    """A Freshet service refuses a request, for a reason that has no error of its own.

    Args:
        text: for people.
        status: HTTP status.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


PROBLEMS: dict[str, type[JobError]] = {
    "urn:freshet:no-such-job": NoSuchJob,
    "urn:freshet:no-controller": NoController,
    "urn:freshet:cluster-silent": ClusterSilent,
    "urn:freshet:controller-silent": ControllerSilent,
    "urn:freshet:refused": Refused,
    "urn:freshet:command-id-reused": CommandIdReused,
    "urn:freshet:plan-changed": PlanChanged,
}
"""`type` of a problem+json answer -> the error that a client raises for it."""


def problem_type(error: JobError) -> str:
    """The `type` that tells a client which error this is."""
    return next((name for name, kind in PROBLEMS.items() if type(error) is kind), "about:blank")
