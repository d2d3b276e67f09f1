"""Where the controller leaves requests and plans for a rank that is training. It never blocks."""

from __future__ import annotations

import threading

from planner.freezing import FreezePlan
from workers.commit.next_plan import NextPlan
from workers.protocol.orders import Request


class Mailbox:
    """Holds requests until the next commit takes them, and the newest prepared plans; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._prepared: FreezePlan | None = None
        self._next_plan: NextPlan | None = None
        self._newest = (0, 0)
        """Epoch and version of the newest plan of the generation that was held ready."""

    def put(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def drain(self) -> tuple[Request, ...]:
        """Return the requests since the last call."""
        with self._lock:
            requests, self._requests = tuple(self._requests), []
        return requests

    def prepare(self, plan: FreezePlan) -> None:
        """Hold `plan` ready, unless a newer one is."""
        with self._lock:
            held = self._prepared
            if held is None or plan.key >= held.key:
                self._prepared = plan

    def prepared(self) -> FreezePlan | None:
        """Return the newest prepared freeze plan, whether or not it is in force."""
        with self._lock:
            return self._prepared

    def prepare_plan(self, plan: NextPlan) -> bool:
        """Hold `plan` ready, unless a newer one is or was; returns whether it is held now."""
        with self._lock:
            newest = plan.key[:2] >= self._newest
            if newest:
                self._newest = plan.key[:2]
                self._next_plan = plan
        return newest

    def next_plan(self) -> NextPlan | None:
        """Return the newest prepared pipeline plan, unless it is in force."""
        with self._lock:
            return self._next_plan

    def taken_up(self, plan: NextPlan) -> None:
        """Forget `plan`: it is in force."""
        with self._lock:
            if self._next_plan is not None and self._next_plan.key[:2] <= plan.key[:2]:
                self._next_plan = None

    def void(self) -> None:
        """Forget what was for an earlier generation: its prepared plans and requests to end it."""
        with self._lock:
            self._prepared = self._next_plan = None
            self._newest = (0, 0)
            self._requests = [request for request in self._requests if request is not Request.REGROUP]
