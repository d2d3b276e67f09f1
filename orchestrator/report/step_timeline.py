"""The newest measured step of a run beside its prediction: as text, SVG, page or Perfetto trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.analysis.predicted_freezing import Ranks
from orchestrator.analysis.predicted_step import PredictedStep, forward_speed, predict_newest
from orchestrator.analysis.step_memory import step_memory
from orchestrator.history.job_view import JobView
from orchestrator.history.thinning import up_to
from orchestrator.pictures.forms import Form
from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_strip import peak_of
from orchestrator.pictures.memory_use import bytes_text, used
from orchestrator.pictures.perfetto import action_lanes, chrome_trace, memory_counters
from orchestrator.pictures.spans import Timeline
from orchestrator.pictures.timeline_picture import Picture
from orchestrator.pictures.timeline_svg import Step, picture
from orchestrator.pictures.timeline_text import legend, terminal
from orchestrator.quantities import percent, seconds
from orchestrator.report.picture_page import picture_page
from orchestrator.report.what_ran import schedule_text
from planner.profile import Profile
from planner.simulation.memory import OverTime

NOTICED = 0.02
"""Smallest relative change of the machine's speed that the summary mentions."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step."""

    step: int
    title: str
    """What ran."""
    ranks: Ranks
    measured: Timeline
    measured_s: float
    """From commit to commit."""
    frozen: Shares
    """The shares that the measured backward passes skipped."""
    predicted: PredictedStep | None
    memory: tuple[tuple[OverTime, ...], tuple[OverTime, ...]] = ((), ())
    """Each rank's memory by use, predicted and measured, from the profile; empty if that is not possible."""

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

    def picture(self, width: int | None = None) -> Picture:
        """The step, below its prediction if there is one, on one time axis of `width` pixels."""
        memory = self.memory
        if self.predicted is None:
            return picture(
                [Step("", self.measured, self.measured_s, self.frozen, memory[1])], self.title, width
            )
        predicted = self.predicted
        steps = [
            Step("predicted", predicted.timeline, predicted.step_s, predicted.frozen, memory[0]),
            Step("measured", self.measured, self.measured_s, self.frozen, memory[1]),
        ]
        return picture(steps, self.title, width)

    def svg(self) -> str:
        """The picture as a separate file."""
        return self.picture().svg()

    def page(self) -> str:
        """The picture on a separate page."""
        heading = f"Step {self.step:,}"
        summary = f"{self.summary}; {self.memory_text}" if self.memory_text else self.summary
        return picture_page(f"{heading} · Freshet", heading, summary, [self.picture()])

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
            lanes = [*action_lanes("predicted", self.predicted.timeline, self.predicted.frozen), *lanes]
        counters = [
            counter
            for group, ranks in zip(("predicted", "measured"), self.memory, strict=True)
            for counter in memory_counters(group, ranks)
        ]
        return chrome_trace(lanes, counters)

    def text(self, width: int, *, markup: bool) -> str:
        """The picture for a terminal of `width` columns."""
        predicted = self.predicted
        end_s = max(self.measured_s, predicted.step_s if predicted is not None else 0.0)
        parts = [legend(self.measured, markup, bool(self.frozen))]
        if predicted is not None:
            parts += ["predicted", terminal(predicted.timeline, width, end_s, markup, predicted.frozen)]
        parts += ["measured", terminal(self.measured, width, end_s, markup, self.frozen)]
        return "\n".join([*parts, *([self.memory_text] if self.memory_text else [])])

    @property
    def forms(self) -> dict[str, Form]:
        """The text of a file, by its suffix."""
        return {".svg": self.svg, ".html": self.page, ".json": self.trace}


def _off(ratio: float) -> str:
    """How far a prediction of `ratio` times the measured time is off, in words."""
    return f"{percent(abs(ratio - 1))} too {'high' if ratio > 1 else 'low'}"


def newest_step(run: JobView, profile: Profile | None = None, step: int | None = None) -> StepTimeline | None:
    """The newest measured step; None if no step was measured.

    Args:
        profile: the run's profile; with it, the step shows memory.
        step: this one instead; None if it was not measured, or is no longer kept.
    """
    if step is not None:
        if step not in run.measured:
            return None
        run = replace(run, measured=up_to(run.measured, step))
    if not run.timelines:
        return None
    newest = max(run.timelines.values(), key=lambda report: report.step_s)
    measured = [
        run.timelines[rank].spans if rank in run.timelines else () for rank in range(max(run.timelines) + 1)
    ]
    frozen = [
        (action.stage, action.microbatch, action.actual) for action in run.freeze.recent.get(newest.step, ())
    ]
    predicted = predict_newest(run)
    expected = (
        step_memory(run, profile, predicted.timeline, predicted.frozen) if predicted is not None else ()
    )
    return StepTimeline(
        step=newest.step,
        title=schedule_text(run.plan, run.spec.get("pipeline", {})) if run.plan is not None else "",
        ranks=run.timelines,
        measured=measured,
        measured_s=newest.step_s,
        frozen=frozen,
        predicted=predicted,
        memory=(expected, step_memory(run, profile, measured, frozen)),
    )
