"""A measured step of a run above its prediction: as text, SVG, page or Perfetto trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from orchestrator.analysis.idle_causes import IdleCauses
from orchestrator.analysis.predicted_freezing import Ranks
from orchestrator.analysis.predicted_step import PredictedStep, forward_speed, predict_newest
from orchestrator.analysis.step_causes import measured_causes, predicted_causes
from orchestrator.analysis.step_memory import step_memory
from orchestrator.history.job_view import JobView
from orchestrator.pictures.forms import Form
from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_strip import peak_of
from orchestrator.pictures.memory_use import bytes_text, used
from orchestrator.pictures.perfetto import action_lanes, chrome_trace, memory_counters
from orchestrator.pictures.spans import Timeline, end_of
from orchestrator.pictures.timeline_svg import Step, picture
from orchestrator.pictures.timeline_text import legend, terminal
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.quantities import percent, seconds
from orchestrator.report.parts import Table
from orchestrator.report.run.what_ran import schedule_text
from orchestrator.report.step.idle_table import idle_table
from orchestrator.report.step.picture_page import Drawn, picture_page
from planner.profile import Profile
from planner.simulation.memory import OverTime

NOTICED = 0.02
"""Smallest relative change of the machine's speed that the summary mentions."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step."""

    step: int
    title: str
    """Schedule that ran, in words."""
    ranks: Ranks
    measured: Timeline
    measured_s: float
    """From commit to commit."""
    frozen: Shares
    """The shares that the measured backward passes skipped."""
    predicted: PredictedStep | None
    memory: tuple[tuple[OverTime, ...], tuple[OverTime, ...]] = ((), ())
    """Each rank's memory by use, predicted and measured, from the profile; empty if that is not possible."""
    causes: tuple[IdleCauses | None, IdleCauses | None] = (None, None)
    """Idle time by cause, predicted and measured; None if the step did not follow the plan."""
    expected_from: str = ""
    """Source of the expected times, in words."""
    kept: tuple[int, ...] = ()
    """The steps of the run of which a timeline is kept."""

    @property
    def summary(self) -> str:
        """Both times, and how far the prediction is off.

        The machine's speed may have changed since. Freezing does not affect forward passes, so their times
        show the change, and the summary also gives the prediction scaled by it.
        """
        predicted = self.predicted
        if predicted is None:
            return f"{seconds(self.measured_s)} from commit to commit"
        if self.measured_s <= 0:
            return f"predicted {seconds(predicted.step_s)}"
        text = (
            f"predicted {seconds(predicted.step_s)} {predicted.source}, measured {seconds(self.measured_s)}:"
            f" the prediction is {_off(predicted.step_s / self.measured_s)}"
        )
        speed = forward_speed(predicted, self.ranks)
        if abs(speed - 1) < NOTICED:
            return text
        scaled = _off(predicted.step_s * speed / self.measured_s)
        return (
            f"{text}; forward passes took {speed:.2f} of their predicted time: scaled by that, it is {scaled}"
        )

    @cached_property
    def steps(self) -> list[Step]:
        """The step, then its prediction if there is one."""
        steps = [self._step("measured", self.measured, self.measured_s, self.frozen, 1)]
        if self.predicted is None:
            return [replace(steps[0], name="")]
        predicted = self.predicted
        return [*steps, self._step("predicted", predicted.timeline, predicted.step_s, predicted.frozen, 0)]

    def _step(self, name: str, timeline: Timeline, end_s: float, frozen: Shares, number: int) -> Step:
        found = self.causes[number]
        critical = found.critical.spans if found is not None else ()
        return Step(name, timeline, end_s, frozen, self.memory[number], frozenset(critical))

    @property
    def view(self) -> TimelineView:
        """The step for a page."""
        return TimelineView(self.title, self.steps)

    @property
    def idle(self) -> Table | None:
        """The measured step's idle time by cause; None if it did not follow the plan."""
        found = self.causes[1]
        return None if found is None else idle_table(found, "measured", self.expected_from)

    def svg(self) -> str:
        """The picture as a separate file."""
        return picture(self.steps, self.title).svg()

    def page(self) -> str:
        """The picture on a separate page."""
        heading = f"Step {self.step:,}"
        summary = f"{self.summary}; {self.memory_text}" if self.memory_text else self.summary
        return picture_page(f"{heading} · Freshet", heading, summary, [Drawn(self.view, self.idle)])

    @property
    def memory_text(self) -> str:
        """The measured step's memory peaks; empty if they are unknown."""
        if not self.memory[1]:
            return ""
        peaks = ", ".join(
            f"rank {rank} {bytes_text(peak_of(used(levels)))}" for rank, levels in enumerate(self.memory[1])
        )
        return f"peak memory, as the profile counts it: {peaks}"

    def trace(self) -> str:
        """A trace for Perfetto."""
        lanes = list(action_lanes("measured", self.measured, self.frozen))
        if self.predicted is not None:
            lanes += action_lanes("predicted", self.predicted.timeline, self.predicted.frozen)
        counters = [
            counter
            for group, ranks in zip(("predicted", "measured"), self.memory, strict=True)
            for counter in memory_counters(group, ranks)
        ]
        return chrome_trace(lanes, counters)

    def values(self) -> dict[str, Any]:
        """The measured step as JSON values, with the fields of the REST interface's `TimelineModel`."""
        return {
            "step": self.step,
            "source": "measured",
            "step_s": self.measured_s,
            "title": self.title,
            "spans": [
                {"rank": rank, "action": str(span.action), "start_s": span.start_s, "end_s": span.end_s}
                for rank, spans in enumerate(self.measured)
                for span in spans
            ],
            "steps": list(self.kept),
        }

    def text(self, width: int, *, markup: bool) -> str:
        """The picture for a terminal of `width` columns."""
        end_s = max(end_of(step.timeline, step.end_s) for step in self.steps)
        marked = any(step.critical for step in self.steps)
        parts = [legend(self.measured, markup, bool(self.frozen), marked)]
        for step in self.steps:
            drawn = terminal(step.timeline, width, end_s, markup, step.frozen, step.critical)
            parts += [step.name or "measured", drawn]
        return "\n".join([*parts, *([self.memory_text] if self.memory_text else [])])

    @property
    def forms(self) -> dict[str, Form]:
        """The text of a file, by its suffix."""
        return {".svg": self.svg, ".html": self.page, ".json": self.trace}


def _off(ratio: float) -> str:
    """Error of a prediction of `ratio` times the measured time, in words."""
    return f"{percent(abs(ratio - 1))} too {'high' if ratio > 1 else 'low'}"


def measured_step(
    run: JobView, profile: Profile | None = None, step: int | None = None
) -> StepTimeline | None:
    """A measured step of `run`; None if none was measured.

    Args:
        profile: the run's profile; with it, the step shows memory.
        step: one of `run.measured`; None: the newest.

    Raises:
        KeyError: `step` was not measured, or is no longer kept.
    """
    if not run.timelines:
        return None
    kept = tuple(sorted(run.measured))
    run = run.as_measured(max(run.measured) if step is None else step)
    newest = max(run.timelines.values(), key=lambda report: report.step_s)
    measured = [
        run.timelines[rank].spans if rank in run.timelines else () for rank in range(max(run.timelines) + 1)
    ]
    frozen = [
        (action.stage, action.microbatch, action.actual) for action in run.freeze.recent.get(newest.step, ())
    ]
    predicted = predict_newest(run)
    foreseen, foreseen_causes = (), None
    if predicted is not None:
        foreseen = step_memory(run, profile, predicted.timeline, predicted.frozen)
        foreseen_causes = predicted_causes(run, predicted)
    causes, expected_from = measured_causes(run, profile, predicted, measured, frozen) or (None, "")
    return StepTimeline(
        step=newest.step,
        title=schedule_text(run.plan, run.spec.get("pipeline", {})) if run.plan is not None else "",
        ranks=run.timelines,
        measured=measured,
        measured_s=newest.step_s,
        frozen=frozen,
        predicted=predicted,
        memory=(foreseen, step_memory(run, profile, measured, frozen)),
        causes=(foreseen_causes, causes),
        expected_from=expected_from,
        kept=kept,
    )
