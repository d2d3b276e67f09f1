"""Holds a job's first steps against their prediction: does its profile still tell what a step takes? Pure.

Steps that something else explains do not count: slow ranks, frozen gradients, another plan than the first one.
"""

from __future__ import annotations

from statistics import median, quantiles

from orchestrator.events import types as events
from orchestrator.prepare.profile_cache import noise
from planner.profile import Profile
from workers.protocol.reports import FreezeStarted, StepReport, SwitchReport

WARM_UP = 5
"""First steps that are not compared."""
COMPARED = 20
"""Steps whose median is compared."""
MOST_STEPS = 200
"""Steps after which unsteady ones are not waited out any more."""
MARGIN = 1.25
"""Factor between predicted and measured step within which a profile holds: machines vary, and so do predictions."""
STEADY = 0.25
"""The most interquartile range of the compared steps over their median."""
SLOW = 1.1
"""Factor on the profile's times from which a rank counts as slow."""
FRESH_S = 3600.0
"""Age up to which a quiet profile is not measured again: it would come out the same."""


class ProfileWatch:
    """Says once whether the profile that a job was planned with is contradicted by its steps.

    Args:
        profile: None: the job has none.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._predicted_s: float | None = None
        self._slow = False
        self._steps = 0
        self._took_s: list[float] = []
        # Emulated devices and data sheets were not measured.
        self._over = profile is None or not profile.key or profile.cluster.devices[0].kind == "emulated"

    def fold(self, event: events.Event) -> events.ProfileDoubted | None:
        """Process a logged event; return the contradiction if there is one."""
        if self._over:
            return None
        match event:
            case events.Submitted(takeover=True):
                self._over = True  # the controller before this one has judged
            case events.Issued(plan=plan) if not self._steps:
                self._predicted_s = plan.predicted_step_s
            case SwitchReport() | FreezeStarted() | events.Regrouped() | events.Migrated():
                self._over = True
            case events.SpeedsChanged(slowdowns=slowdowns):
                self._slow = any(factor >= SLOW for _, factor in slowdowns)
            case StepReport(effective_update=whole) if whole < 1.0:
                self._over = True
            case StepReport():
                return self._judge(event)
            case _:
                pass
        return None

    def _judge(self, report: StepReport) -> events.ProfileDoubted | None:
        self._steps += 1
        if self._steps > WARM_UP:
            self._took_s = [*self._took_s, report.step_s][-COMPARED:]
        if self._steps > MOST_STEPS or not self._predicted_s:
            self._over = True
            return None
        if len(self._took_s) < COMPARED:
            return None
        took_s = median(self._took_s)
        low, _, high = quantiles(self._took_s, n=4)
        if took_s <= 0 or (high - low) / took_s > STEADY:
            return None
        self._over = True
        if max(took_s / self._predicted_s, self._predicted_s / took_s) <= MARGIN:
            return None
        if took_s > self._predicted_s and self._slow:
            return None
        assert self._profile is not None
        measured_s = self._profile.measured_s
        fresh = measured_s is not None and report.committed_s - measured_s < FRESH_S
        return events.ProfileDoubted(
            key=self._profile.key,
            profile_s=measured_s,
            disturbed=noise(self._profile) or "",
            predicted_s=self._predicted_s,
            took_s=took_s,
            step=report.step,
            again=not fresh or noise(self._profile) is not None,
        )
