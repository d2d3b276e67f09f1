"""`report.html`: one self-contained page about a job, made from its event log and the profile beside it.

It loads nothing from elsewhere: styles, pictures and the script that draws the charts are inline, and the
page's Content-Security-Policy forbids everything else. The templates escape every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis.step_memory import profile_beside
from orchestrator.events.log import read_log
from orchestrator.events.segments import replace_file
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.unreported import unreported
from orchestrator.report.assets import render_page
from orchestrator.report.parts import ReportNote, Table, Tile
from orchestrator.report.run.freezing import FreezingPart, freezing
from orchestrator.report.run.moves import moves
from orchestrator.report.run.planning import PlanningPart, planning
from orchestrator.report.run.rank_memory import MemoryPart, rank_memory
from orchestrator.report.run.recovery import RecoveryPart, recovery
from orchestrator.report.run.sections import (
    Header,
    TrainingCurves,
    checkpoints,
    footer,
    header,
    notes,
    spec,
    tiles,
    training,
)
from orchestrator.report.run.speeds import SpeedsPart, speeds
from orchestrator.report.run.surroundings import SurroundingsPart, surroundings
from orchestrator.report.run.what_ran import Term, what_ran
from orchestrator.report.step.timeline import TimelinePart, timeline
from planner.profile import Profile
from workers.protocol.reports import SampleReport

REPORT_NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the page; a section with nothing to show is None or empty."""

    header: Header
    notes: tuple[ReportNote, ...]
    tiles: tuple[Tile, ...]
    training: TrainingCurves | None
    recovery: RecoveryPart | None
    speeds: SpeedsPart | None
    surroundings: SurroundingsPart | None
    moves: Table | None
    freezing: FreezingPart | None
    timeline: TimelinePart | None
    memory: MemoryPart | None
    planning: PlanningPart | None
    what_ran: tuple[Term, ...]
    checkpoints: Table | None
    sample: SampleReport | None
    spec: str
    footer: str


def report_of(run: JobView, profile: Profile | None = None) -> Report:
    """The content of the page about `run`.

    Args:
        profile: the run's profile; with it, the page shows memory.
    """
    return Report(
        header=header(run),
        notes=notes(run),
        tiles=tiles(run),
        training=training(run),
        recovery=recovery(run),
        speeds=speeds(run),
        surroundings=surroundings(run),
        moves=moves(run),
        freezing=freezing(run),
        timeline=timeline(run, profile),
        memory=rank_memory(run, profile),
        planning=planning(run),
        what_ran=what_ran(run),
        checkpoints=checkpoints(run),
        sample=run.sample,
        spec=spec(run),
        footer=footer(run),
    )


def render(run: JobView, profile: Profile | None = None) -> str:
    """The page about `run`, as HTML."""
    return render_page("report.html.j2", {"report": report_of(run, profile)}, charts=True, timelines=True)


def write_report(log: Path, destination: Path | None = None, folder: str | None = None) -> Path:
    """Write the page about the event log `log`, by default beside it, and return its path.

    With a profile beside the log, the page shows memory too. A reader sees the old page or the new one, never
    half of one.

    Args:
        folder: the job's folder, where ranks may have left reports that the log lacks; None: the log's.

    Raises:
        OSError: the log cannot be read or the page cannot be written.
        ValueError: the log is damaged; names the line.
    """
    destination = destination or log.with_name(REPORT_NAME)
    records = list(read_log(log))
    records += unreported(folder or str(log.parent), records)
    page = render(fold(records), profile_beside(log))
    replace_file(destination, page.encode())
    return destination
