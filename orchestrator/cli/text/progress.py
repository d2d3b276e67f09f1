"""Shows a job's progress while it trains: a bar on a terminal, plain lines in a log, with the same fields.

Receives the ranks' reports as they arrive; does not know their source, and of the job only its name and number of
steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from orchestrator.analysis.remaining_time import RECENT_STEPS, remaining_s
from orchestrator.events.reports import report_sentence, skipped_text, step_fields, validation_text
from orchestrator.history.freeze_record import FrozenStep
from orchestrator.history.phase_bands import Band, phase_at, phase_bands
from orchestrator.quantities import percent, seconds
from workers.protocol.reports import CheckpointReport, FreezeReport, Report, StepReport, ValidationReport


class FreezeStatus:
    """The freezing fields of a progress line, followed from the ranks' reports; empty for a job that never freezes."""

    def __init__(self) -> None:
        self._bands: tuple[Band, ...] = ()
        self._step = 0
        self._frozen = FrozenStep()
        self._before = FrozenStep()
        """The previous step, which every rank has reported."""

    def expect(self, freeze: Mapping[str, Any], steps: int) -> None:
        """Learn the phases of a job of `steps` steps from its resolved `[freeze]` section."""
        self._bands = phase_bands([(1, freeze)], steps)

    def fold(self, report: FreezeReport) -> None:
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


def checkpoint_text(report: CheckpointReport) -> str:
    """A finished or failed checkpoint in words; a failure catches the eye."""
    if report.error is not None:
        return f"checkpoint of step {report.step} FAILED, the ones before it stay: {report.error}"
    return report_sentence(report)


class LineProgress:
    """Plain lines for a log: the first step, one every `every_s` seconds, the last; and all other reports."""

    def __init__(
        self,
        console: Console,
        steps: int,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps = steps
        self._every_s = every_s
        self._clock = clock
        self._due_s = -math.inf
        self._held: StepReport | None = None
        """The newest step, until it is printed."""
        self._newest: deque[StepReport] = deque(maxlen=RECENT_STEPS)
        self._freezing = FreezeStatus()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print_held()

    def expect_steps(self, steps: int) -> None:
        """Learn how many steps the job has, where its data decides."""
        self._steps = steps

    def expect_freezing(self, freeze: Mapping[str, Any]) -> None:
        """Show the phase of each step from now on; `freeze` is the resolved `[freeze]` section."""
        self._freezing.expect(freeze, self._steps)

    def show(self, report: Report) -> None:
        """Print `report`, unless it is a step and the last line of a step is younger than `every_s`."""
        if isinstance(report, StepReport):
            self._held = report
            self._newest.append(report)
            now_s = self._clock()
            if report.skipped:
                self._print_held()
                self._print(skipped_text(report))
            elif now_s >= self._due_s or report.step >= self._steps:
                self._print_held()
                self._due_s = now_s + self._every_s
        elif isinstance(report, ValidationReport):
            self._print_held(report.step)
            self._print(f"step {self._count(report.step)}  {validation_text(report)}")
        elif isinstance(report, CheckpointReport):
            self._print_held(report.step)
            self._print(checkpoint_text(report))
        elif isinstance(report, FreezeReport):
            self._freezing.fold(report)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print a line that is no report: a phase of the job, a warning."""
        self._print(f"warning: {text}" if warning else text)

    def _print_held(self, step: int | None = None) -> None:
        """Print the held step; with `step`, only if it is that one."""
        if self._held is not None and step in (None, self._held.step):
            fields = step_fields(self._held, freezing=self._freezing.fields(self._held.step))
            left_s = remaining_s(tuple(self._newest), self._steps)
            left = f"  about {seconds(left_s)} left" if left_s else ""
            self._print(f"step {self._count(self._held.step)}  {fields}{left}")
            self._held = None

    def _count(self, step: int) -> str:
        return f"{step:>{len(str(self._steps))}}/{self._steps}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarProgress:
    """A bar for a terminal, the newest step's figures under it; failures and skipped steps scroll above."""

    def __init__(self, console: Console, name: str, steps: int, first_step: int = 1) -> None:
        self._bar = _Bar(console, name, steps, first_step)
        self._steps = steps
        self._freezing = FreezeStatus()
        self._step: StepReport | None = None
        self._validation: ValidationReport | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def expect_steps(self, steps: int) -> None:
        """Learn how many steps the job has, where its data decides."""
        self._steps = steps
        self._bar.expect(steps)

    def expect_freezing(self, freeze: Mapping[str, Any]) -> None:
        """Show the phase of each step from now on; `freeze` is the resolved `[freeze]` section."""
        self._freezing.expect(freeze, self._steps)

    def show(self, report: Report) -> None:
        """Move the bar to `report`."""
        if isinstance(report, StepReport):
            if report.skipped:
                self.note(skipped_text(report), warning=True)
            self._step = report
            self._move()
        elif isinstance(report, ValidationReport):
            self._validation = report
            self._move()
        elif isinstance(report, CheckpointReport):
            if report.error is not None:
                self.note(checkpoint_text(report), warning=True)
            else:
                self._bar.saved(report.step)
        elif isinstance(report, FreezeReport):
            self._freezing.fold(report)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print a line above the bar."""
        line = Text(f"warning: {text}", style="bold yellow") if warning else Text(text)
        self._bar.console.print(line, highlight=False)

    def _move(self) -> None:
        if self._step is not None:
            freezing = self._freezing.fields(self._step.step)
            self._bar.move(self._step.step, step_fields(self._step, self._validation, freezing))


class _Bar(Progress):
    """Rich's bar with a line of figures below."""

    def __init__(self, console: Console, name: str, steps: int, first_step: int) -> None:
        self._figures = ""
        self._saved = ""
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            expand=True,
        )
        self._task = self.add_task(name, total=steps, completed=first_step - 1)

    def expect(self, steps: int) -> None:
        self.update(self._task, total=steps)

    def move(self, step: int, figures: str) -> None:
        self._figures = figures
        self.update(self._task, completed=step)

    def saved(self, step: int) -> None:
        self._saved = f"  checkpoint {step}"
        self.refresh()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self._figures + self._saved)


def open_progress(
    console: Console, name: str, steps: int, *, first_step: int = 1
) -> BarProgress | LineProgress:
    """The display that suits `console`, as a context manager. A resumed job has a later `first_step`."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BarProgress(console, name, steps, first_step)
    return LineProgress(console, steps)
