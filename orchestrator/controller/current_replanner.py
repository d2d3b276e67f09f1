"""The replanner that a controller plans with now, and the speeds of its ranks: both change while a job trains.

Knows no events and makes no plans; whoever learns something new about the job sets it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.adapt.layer_times import Factors, with_factors
from planner.adapt.speeds import Slowdowns
from planner.search.replan import Replanner


class CurrentReplanner:
    """The one place in a controller that holds its job's replanner. Use it on the event loop; a thread that plans gets
    the `replanner` of the moment, which itself never changes.

    Args:
        first: as the job began: its profile has the job's memory limits and the copies of the spec's freeze method.
        changed: called after each change: plans that were made ahead are out of date.
    """

    def __init__(self, first: Replanner, changed: Callable[[], None] = lambda: None) -> None:
        self._replanner = first
        self._profile = first.profile
        self._method: str | None = None
        self._known = Slowdowns()
        self._factors: Factors = ()
        self._changed = changed

    @property
    def replanner(self) -> Replanner:
        """The replanner as of now. Read it for each plan, and keep it for none: another one may take its place."""
        return self._replanner

    @property
    def known(self) -> Slowdowns:
        """The speeds of the ranks that have been measured."""
        return self._known

    def set(
        self, *, method: str | None = None, known: Slowdowns | None = None, factors: Factors = ()
    ) -> None:
        """Plan for the copies of another freeze method, or with other speeds or times, from now on.

        Args:
            method: a `freeze.method`, whose copies of the weights every plan must have room for. None: as before.
            known: the speeds of the ranks. None: as before.
            factors: on the layers' times. Empty: as before.
        """
        self._factors = factors or self._factors
        known = self._known if known is None else known
        other, self._known = known != self._known, known
        self._method = self._method if method is None else method
        planned = None if self._profile is None else with_factors(self._profile, self._factors)
        if planned is not None and self._method is not None:
            planned = planned.frozen_by(self._method)
        if planned != self._replanner.profile:
            # A new one, which remembers no answers: those of the old one are for the copies that it counts.
            self._replanner = replace(self._replanner, profile=planned)
        elif not other:
            return
        self._changed()
