"""A page about jobs that a neighbour disturbed, beside each other: `interference.html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from orchestrator.analysis.interference_time import InterferenceTime, Trial, interference_time
from orchestrator.analysis.job_summary import model_text
from orchestrator.events.log import read_log
from orchestrator.events.segments import replace_file
from orchestrator.history.job_view import JobView, fold
from orchestrator.pictures.charts import Chart, Series, of_times
from orchestrator.quantities import deviation, percent, seconds, significant
from orchestrator.report.assets import render_page
from orchestrator.report.interference.interference_text import HOW, noticed_text
from orchestrator.report.parts import Cell, Column, Pill, ReportNote, Table, Tile, Tone, tile
from orchestrator.report.run.moves import moves
from orchestrator.report.run.speeds import SpeedsPart, speeds
from orchestrator.report.run.what_ran import device_text, plan_changes, visit_bands
from planner.wording import counted

PAGE_NAME = "interference.html"


@dataclass(frozen=True)
class AdaptedJob:
    """Known rank speeds and layer moves of one job."""

    policy: str
    speeds: SpeedsPart | None
    moves: Table | None


@dataclass(frozen=True, kw_only=True)
class InterferencePart:
    """The jobs beside each other, as their page and the dashboard show them."""

    disturbed: str
    """Disturbed rank and cause, in words."""
    tiles: tuple[Tile, ...]
    numbers: Table
    answers: Table | None
    how: str


@dataclass(frozen=True, kw_only=True)
class InterferencePage:
    """The content of the page."""

    title: str
    summary: str
    notes: tuple[ReportNote, ...]
    chart: Chart
    part: InterferencePart
    adapted: tuple[AdaptedJob, ...]


def interference_page(runs: Sequence[JobView], name: str) -> InterferencePage:
    """The content of the page about `runs`, of which there is at least one.

    Args:
        name: of the job that was rehearsed.
    """
    found = interference_time(runs)
    return InterferencePage(
        title=name,
        summary=_summary(runs[-1]),
        notes=_notes(runs, found),
        chart=_step_time(runs),
        part=_part(runs, found),
        adapted=tuple(
            AdaptedJob(trial.policy, speeds(run), moves(run))
            for run, trial in zip(runs, found.trials, strict=True)
            if trial.policy != "off"
        ),
    )


def interference_part(runs: Sequence[JobView]) -> InterferencePart | None:
    """`runs` beside each other; None unless all were disturbed and each follows another policy."""
    policies = {_policy(run) for run in runs}
    if len(policies) < len(runs) or any(run.disturbed is None for run in runs):
        return None
    return _part(runs, interference_time(runs))


def _policy(run: JobView) -> str:
    return run.spec.get("adapt", {}).get("policy", "off")


def _part(runs: Sequence[JobView], found: InterferenceTime) -> InterferencePart:
    disturbed = next((run.disturbed for run in runs if run.disturbed is not None), None)
    return InterferencePart(
        disturbed=f"Rank {disturbed.rank} was slowed down by {disturbed.by}."
        if disturbed is not None
        else "",
        tiles=_tiles(found),
        numbers=_numbers(found),
        answers=_answers(found),
        how=HOW,
    )


def write_interference_page(logs: Sequence[Path], destination: Path, name: str) -> Path:
    """Write the page about the event logs `logs` to `destination`, and return that.

    Raises:
        OSError: a log cannot be read or the page cannot be written.
        ValueError: a log is damaged; names the line.
    """
    page = render(interference_page([fold(read_log(log)) for log in logs], name))
    replace_file(destination, page.encode())
    return destination


def render(page: InterferencePage) -> str:
    """The page as HTML."""
    return render_page("interference.html.j2", {"page": page}, charts=True)


def _summary(run: JobView) -> str:
    parts = [model_text(run.spec.get("model", {}))]
    if run.plan is not None:
        parts += [counted(run.plan.world_size, "rank"), run.plan.schedule]
    return " · ".join(part for part in (*parts, device_text(run), f"{run.last_step:,} steps each") if part)


def _notes(runs: Sequence[JobView], found: InterferenceTime) -> tuple[ReportNote, ...]:
    notes = [ReportNote("good" if found.conclusive else "warn", "Verdict", f"{found.verdict}.")]
    if found.emulated:
        notes.append(
            ReportNote(
                "warn",
                "Warning",
                "Emulated device: times come from modelled layer times, and an injected fault stands for the"
                " neighbour.",
            )
        )
    if found.same_state is False:
        notes.append(ReportNote("bad", "Error", "The jobs ended with different states."))
    notes += [
        ReportNote("warn", "Warning", f"{trial.policy}: the job was not trained to its end.")
        for run, trial in zip(runs, found.trials, strict=True)
        if trial.state_sha256 is None or run.step < run.last_step
    ]
    return tuple(notes)


def _tiles(found: InterferenceTime) -> tuple[Tile, ...]:
    emulated = ", emulated" if found.emulated else ""
    entries = []
    if found.undisturbed_s is not None:
        entries.append(("Step without neighbour", seconds(found.undisturbed_s), f"median{emulated}"))
    if found.best_s is not None:
        entries.append(("Beside it, best cut", seconds(found.best_s), f"median{emulated}"))
    for trial in found.trials:
        if trial.disturbed_s is not None:
            entries.append((f"Beside it, {trial.policy}", seconds(trial.disturbed_s), f"median{emulated}"))
    entries += [
        (f"Productive time, {trial.policy}", percent(trial.productive), f"of {seconds(trial.seconds)}")
        for trial in found.trials
        if trial.productive is not None
    ]
    return tuple(tile(*entry) for entry in entries)


def _step_time(runs: Sequence[JobView]) -> Chart:
    return of_times(
        Chart(
            title="Step time",
            unit="s",
            series=tuple(
                Series(
                    name=_policy(run),
                    points=tuple((step, run.steps[step].step_s) for step in sorted(run.steps)),
                )
                for run in runs
            ),
            format=significant,
            from_zero=True,
            bands=visit_bands(runs[-1]),
            changes=plan_changes(runs[-1]),
            emulated=runs[-1].emulated,
            height=320,
        )
    )


def _numbers(found: InterferenceTime) -> Table:
    """A row per figure, a column per job."""
    columns = [_column(trial, found) for trial in found.trials]
    return Table(
        label="Numbers of the jobs",
        columns=(Column("Figure"), *(Column(trial.policy, "number") for trial in found.trials)),
        rows=tuple((figure, *(column[figure] for column in columns)) for figure in columns[0]),
    )


def _column(trial: Trial, found: InterferenceTime) -> dict[str, Cell]:
    digest: Cell = "–"
    if trial.state_sha256 is not None:
        tones: dict[bool | None, Tone] = {True: "good", False: "bad", None: "warn"}
        digest = Pill(f"{trial.state_sha256[:8]}…", tones[found.same_state])
    return {
        "Steps counted": f"{trial.steps:,}",
        "Time of these steps": seconds(trial.seconds),
        "Productive time": percent(trial.productive) if trial.productive is not None else "–",
        "Time without any neighbour, of that": percent(trial.undisturbed)
        if trial.undisturbed is not None
        else "–",
        "Step beside the neighbour, median": seconds(trial.disturbed_s)
        if trial.disturbed_s is not None
        else "–",
        "Moves of layers": f"{trial.moves:,}",
        "Step with each new plan, measured over predicted": _off_by(trial),
        "Committed steps lost": f"{trial.steps_lost:,}",
        "Steps run again": f"{trial.steps_rerun:,}",
        "State SHA-256": digest,
    }


def _off_by(trial: Trial) -> str:
    """The median of a job's plans, and the range."""
    known = [plan.off_by for plan in trial.plans if plan.off_by is not None]
    if not known:
        return "–"
    text = deviation(median(known))
    return text if len(known) == 1 else f"{text} ({deviation(min(known))} to {deviation(max(known))})"


def _answers(found: InterferenceTime) -> Table | None:
    rows = tuple(
        (
            f"{answer.first:,}–{answer.last:,}",
            trial.policy,
            noticed_text(answer) if trial.policy != "off" else "–",
            f"after {counted(answer.in_force, 'step')}" if answer.in_force is not None else "–",
            seconds(answer.step_s),
        )
        for trial in found.trials
        for answer in trial.answers
    )
    if not rows:
        return None
    return Table(
        label="Visits of the neighbour",
        columns=(
            Column("Steps"),
            Column("Policy"),
            Column("Detected", "text"),
            Column("Other cut in force"),
            Column("Step, second half", "number"),
        ),
        rows=rows,
    )
