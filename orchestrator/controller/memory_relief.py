"""Has later plans keep within the memory that ranks turned out to have.

How much that is, is decided in `planner/adapt/memory_pressure.py`; here it is passed on to every plan and logged. Runs
on the controller's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.controller.current_replanner import CurrentReplanner
from orchestrator.events.types import Event, MemoryLimited, OutOfMemory
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from planner.adapt.memory_pressure import limit_after_failure
from planner.search.recomputing import every_recompute


class MemoryRelief:
    """The memory of one job's ranks while its controller lives.

    Args:
        post: takes what is to be logged.
        view: returns the job's view, with everything that is logged.
        planning: gets the limits, for every plan that is made.
    """

    def __init__(
        self, post: Callable[[Stimulus], None], view: Callable[[], JobView], planning: CurrentReplanner
    ) -> None:
        self._post = post
        self._view = view
        self._planning = planning

    def go_on(self) -> None:
        """Know what the previous controller knew, from the log."""
        known = self._view().memory
        self._planning.set(limits=known.limits, recompute=self._all() if known.recompute else None)

    def take(self, event: Event) -> None:
        """Follow a logged event: once this returns, plans are made with what it tells."""
        if isinstance(event, OutOfMemory):
            self._limit(event)

    def _limit(self, short: OutOfMemory) -> None:
        plans = [decision.plan for decision in self._view().decisions]
        failed = next((plan for plan in reversed(plans) if plan.key == short.plan), None)
        if failed is None:
            return
        held = short.shortage.held_bytes
        limit = limit_after_failure(self._planning.replanner, failed, short.place, held)
        if limit is None:
            reason = "without a profile of the job, a smaller plan is the one in which all layers recompute"
            self._planning.set(recompute=self._all())
        else:
            limit = min(limit, self._planning.limits.get(short.rank, limit))
            reason = f"plan {failed.epoch}.{failed.version} took more than it has"
            self._planning.set(limits={**self._planning.limits, short.rank: limit})
        event = MemoryLimited(rank=short.rank, limit_bytes=limit, reason=reason, step=short.step)
        self._post(Noted(event))

    def _all(self) -> tuple[int, ...]:
        return every_recompute(self._planning.replanner.first)
