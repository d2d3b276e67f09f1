"""The freezing fields of a progress line: the step's phase and how much is frozen. Knows no display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.history.freeze_record import FrozenStep
from orchestrator.history.phase_bands import Band, phase_at, phase_bands
from orchestrator.quantities import percent
from workers.protocol import FreezeReport


class FreezeStatus:
    """Follows the ranks' reports; empty for a job that never freezes."""

    def __init__(self) -> None:
        self._bands: tuple[Band, ...] = ()
        self._step = 0
        self._frozen = FrozenStep()
        self._before = FrozenStep()
        """The previous step, which every rank has reported."""

    def expect(self, freeze: Mapping[str, Any], steps: int) -> None:
        """Learn the phases of a job of `steps` steps from its resolved `[freeze]` section."""
        self._bands = phase_bands([(1, freeze)], steps)

    def take(self, report: FreezeReport) -> None:
        """Add what one rank froze in one step."""
        if report.step > self._step:
            self._step, self._before, self._frozen = report.step, self._frozen, FrozenStep()
        if report.step == self._step:
            for action in report.actions:
                self._frozen.add(action)

    def fields(self, step: int) -> list[str]:
        """The fields for `step`: its phase, and the share of weight-gradient time that the newest step froze."""
        phase = phase_at(self._bands, step)
        if phase is None:
            return []
        frozen = self._before if self._before.actions else self._frozen
        if not frozen.actions:
            return [f"phase {phase}"]
        return [f"phase {phase}", f"frozen {percent(frozen.actual / frozen.actions)}"]
