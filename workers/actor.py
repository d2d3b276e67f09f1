"""The Ray shell around one rank: it carries calls in and reports out, and makes errors fit to travel.

Training runs in the default concurrency group, on one thread; control calls have their own, so that they
reach a rank while it trains. Knows nothing of what is trained.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from planner.ir import Schedule
from planner.plan import Plan
from workers.config import WorkerConfig
from workers.host_memory import settle_objects
from workers.protocol import (
    CheckpointRef,
    DamagedCheckpoint,
    Generation,
    JobError,
    Outcome,
    Report,
    Request,
)
from workers.storage import open_folder

CONTROL = "control"
"""Concurrency group of the calls that must not wait for training."""
UNREAD_REPORTS = 256
"""How many of the newest reports are waited for before a rank's training returns."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a rank lives."""

    node: str
    host: str
    pid: int


class RankError(Exception):
    """What a rank raised, without the types of torch: any process can read it."""

    def __init__(
        self, message: str, user_error: bool = False, cut_off: bool = False, details: str = ""
    ) -> None:
        super().__init__(message, user_error, cut_off, details)
        self.message = message
        self.user_error = user_error
        """The user can mend it."""
        self.cut_off = cut_off
        """The rank lost another one, or was told to leave: the cause lies elsewhere."""
        self.details = details
        """The traceback, where the message alone does not say enough."""

    def __str__(self) -> str:
        return self.message


class RankActor:
    """One rank.

    Args:
        rank: the global rank.
        controller: takes the reports, in a method `report`.
        marker: name of a file in the job's folder, and what it must hold: a node that does not see it does
            not share the folder.
    """

    def __init__(
        self, config: WorkerConfig, rank: int, controller: ActorHandle, marker: tuple[str, bytes]
    ) -> None:
        _set_environment(config)
        # PyTorch loads this at its first backward; the ranks of a pipeline would do so one after the other.
        import torch.fx.experimental.symbolic_shapes  # noqa: F401

        from workers.rank import Rank

        self._config = config
        self._marker = marker
        self._controller: Any = controller
        self._unread: deque[ray.ObjectRef] = deque(maxlen=UNREAD_REPORTS)
        self._rank = Rank(config, rank, self._send)

    def setup(self) -> Home:
        """Open model and data.

        Raises:
            RankError: either fails, or this node does not see the job's folder.
        """
        context = ray.get_runtime_context()
        home = Home(node=context.get_node_id(), host=ray.util.get_node_ip_address(), pid=os.getpid())
        with travelling_errors():
            check_folder(self._config.output, self._marker, home.host)
            self._rank.setup()
        return home

    def follow(self, plan: Plan, schedule: Schedule, start: CheckpointRef | None) -> DamagedCheckpoint | None:
        """Build the layers that `plan` gives this rank and load them; see `Rank.follow`."""
        with travelling_errors():
            return self._rank.follow(plan, schedule, start)

    def host_store(self) -> tuple[str, int]:
        """Host the store of the next generation: address and port."""
        host = ray.util.get_node_ip_address()
        with travelling_errors():
            return host, self._rank.host_store(host)

    def join(self, generation: Generation) -> None:
        """Form the process group. Whatever fails here, another rank may have failed before."""
        with travelling_errors(cut_off=True):
            self._rank.join(generation)
        settle_objects()

    def train(self) -> Outcome:
        """Train; returns once the controller has taken in every report of this rank."""
        try:
            with travelling_errors():
                return self._rank.train()
        finally:
            if self._unread:
                # A controller that is gone is no reason to hold a trained rank back.
                ray.wait(list(self._unread), num_returns=len(self._unread), timeout=10.0)

    @ray.method(concurrency_group=CONTROL)
    def request(self, request: Request) -> None:
        """Drop a request into the mailbox."""
        self._rank.request(request)

    @ray.method(concurrency_group=CONTROL)
    def leave(self) -> None:
        """Drop the process group: a blocked `train` raises; a `join` still under way ends at its own timeout."""
        self._rank.leave()

    def _send(self, report: Report) -> None:
        self._unread.append(self._controller.report.remote(report))


def check_folder(output: str, marker: tuple[str, bytes], host: str) -> None:
    """Whether the node `host`, on which this runs, sees the job's folder.

    Raises:
        JobError: the file that `marker` names is not there, or is another job's or an earlier start's.
    """
    name, content = marker
    try:
        seen = open_folder(output).read(name)
    except OSError:
        seen = None
    if seen != content:
        raise JobError(
            f"node {host} does not see the job's folder {output}: put job.output on a file system that all"
            " nodes share, or on a URI such as s3://bucket/folder"
        )


def _set_environment(config: WorkerConfig) -> None:
    """Set what torch and cuBLAS read when they are loaded, which only a rank's own process does."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.threads)
    # Without workspaces of fixed size cuBLAS is not deterministic.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


@contextmanager
def travelling_errors(cut_off: bool = False) -> Iterator[None]:
    """Raise whatever is raised inside as a `RankError`; `cut_off`: blame none of it on this rank."""
    try:
        yield
    except JobError as error:
        raise RankError(str(error), user_error=True) from None
    except Exception as error:
        from workers.transport.channel import ChannelError

        message = f"{type(error).__name__}: {error}"
        raise RankError(
            message, cut_off=cut_off or isinstance(error, ChannelError), details=traceback.format_exc()
        ) from None
