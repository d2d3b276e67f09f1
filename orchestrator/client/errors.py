"""The errors that a client of jobs can get, in one place for those who tell people of them."""

from __future__ import annotations

from orchestrator.client.asking import ControllerSilent, NoController, NoSuchJob, Refused
from orchestrator.history.command_table import CommandIdReused
from orchestrator.history.proposal import PlanChanged
from workers.protocol import JobError

__all__ = [
    "CommandIdReused",
    "ControllerSilent",
    "JobError",
    "NoController",
    "NoSuchJob",
    "PlanChanged",
    "Refused",
]
